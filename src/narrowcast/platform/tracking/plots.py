"""The figures of one run, built without pyplot so that no state is shared between threads or tests."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from narrowcast.platform.tracking.units import BYTE_UNITS, TIME_UNITS, Unit, axis_unit, format_percent
from narrowcast.platform.types import BoolArray, FloatArray, IntArray

# Okabe and Ito's palette, less the yellow and the pale blue, which vanish on white.
BLUE, VERMILLION, GREEN, ORANGE, PURPLE, BLACK = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#E69F00",
    "#CC79A7",
    "#000000",
)
METRICS = {"hr@10": ("HR@10", BLUE), "ndcg@10": ("NDCG@10", VERMILLION)}
_MOST_MARKERS, _MOST_RANK_LABELS = 40, 12


@dataclass(frozen=True)
class Cost:
    """What accuracy is plotted against: a column that grows from round to round."""

    column: str
    label: str
    units: tuple[Unit, ...]

    def axis_label(self, unit: Unit) -> str:
        """The label of an axis in this unit."""
        return f"{self.label} ({unit.symbol})"


UPLINK = Cost("total_uplink_bits", "cumulative uplink", BYTE_UNITS)
TIME = Cost("simulated_seconds", "simulated time", TIME_UNITS)


def draw_plots(rounds: pa.Table, clients: pa.Table, folder: Path, title: str) -> list[Path]:
    """Write the figures of a run as PNG files, leaving out those for which nothing was measured."""
    figures = {
        "accuracy_uplink.png": accuracy_figure(rounds, UPLINK, f"{title}: accuracy against uplink"),
        "accuracy_time.png": accuracy_figure(rounds, TIME, f"{title}: accuracy against simulated time"),
        "client_bits_ranks.png": client_figure(clients, f"{title}: ranks and uplink of the clients"),
        "loss_time.png": loss_figure(rounds, f"{title}: training loss"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        if figure is not None:
            figure.savefig(folder / name, dpi=150)
            paths.append(folder / name)
    return paths


def accuracy_figure(rounds: pa.Table, cost: Cost, title: str) -> Figure | None:
    """HR@10 and NDCG@10 against a cost; None where no test metric was measured."""
    figure, (axes,) = new_figure(title, panels=1)
    unit = axis_unit(cost.units, column(rounds, cost.column).max(initial=0.0))
    for metric, (label, colour) in METRICS.items():
        for split in ("validation", "test"):
            x, y = curve(rounds, cost, f"{split}.{metric}")
            if not len(x):
                continue
            test = split == "test"
            style = (
                {"linewidth": 1.8, "marker": marker(x)}
                if test
                else {"linewidth": 1, "alpha": 0.45, "dashes": (4, 2)}
            )
            axes.plot(x / unit.size, 100 * y, color=colour, markersize=4, label=f"{label}, {split}", **style)
            if test:
                # HR@10 is never below NDCG@10, so that labels on opposite sides cannot meet.
                side = "bottom" if metric == "hr@10" else "top"
                axes.annotate(
                    format_percent(y[-1]), (x[-1] / unit.size, 100 * y[-1]), (7, 0), textcoords="offset points",
                    color=colour, va=side, fontsize=9, fontweight="bold",
                )  # fmt: skip
    handles, labels = axes.get_legend_handles_labels()
    if not any(label.endswith("test") for label in labels):
        return None
    last = max(line.get_xdata()[-1] for line in axes.lines)
    axes.set_xlim(0, 1.15 * last if last > 0 else 1)  # the margin is the annotations'
    axes.margins(y=0.12)
    axes.set(xlabel=cost.axis_label(unit), ylabel="accuracy (%)")
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def client_figure(clients: pa.Table, title: str) -> Figure | None:
    """Which ranks the participations had, and what each sent over which link; None without participations."""
    if not clients.num_rows:
        return None
    figure, (bars, points) = new_figure(title, panels=2)
    ranks, place, counts = np.unique(
        column(clients, "rank").astype(np.int64), return_inverse=True, return_counts=True
    )
    colours = rank_colours(ranks)

    bars.bar(np.arange(len(ranks)), 100 * counts / counts.sum(), width=0.8, color=colours, zorder=2)
    if len(ranks) <= _MOST_RANK_LABELS:
        for index, share in enumerate(100 * counts / counts.sum()):
            bars.annotate(
                f"{share:.3g}",
                (index, share),
                (0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=8,
            )
    middle, half = (len(ranks) - 1) / 2, max(len(ranks), 5) / 2
    bars.set_xlim(middle - half, middle + half)
    shown = np.arange(0, len(ranks), math.ceil(len(ranks) / _MOST_RANK_LABELS))
    bars.set_xticks(shown, [str(rank) for rank in ranks[shown]])
    bars.margins(y=0.1)
    bars.set(ylabel="share of participations (%)")
    bars.set_xlabel("rank (0: sent nothing)" if ranks[0] == 0 else "rank")

    rate = column(clients, "uplink_bits_per_second") / 1e6
    drawn = np.isfinite(rate) & (rate > 0)
    points.scatter(
        rate[drawn], column(clients, "uplink_bits")[drawn] / 8e3, s=9, c=colours[place[drawn]], linewidths=0,
        alpha=float(np.clip(4000 / max(1, drawn.sum()), 0.15, 0.8)), rasterized=True, zorder=2,
    )  # fmt: skip
    log_axis(points, rate[drawn])
    points.set_ylim(bottom=min(0.0, points.get_ylim()[0]))
    points.set(xlabel="client's uplink rate (Mbit/s)", ylabel="uplink per participation (kB)")
    points.set_title("colour: rank, as on the left", fontsize=9)
    return figure


def loss_figure(rounds: pa.Table, title: str) -> Figure | None:
    """Training loss of each round and its running mean against simulated time; None where no loss is finite."""
    x, loss = curve(rounds, TIME, "loss")
    if not len(x):
        return None
    figure, (axes,) = new_figure(title, panels=1)
    unit = axis_unit(TIME.units, x[-1])
    window = max(1, len(loss) // 20)
    axes.plot(
        x / unit.size,
        loss,
        color=BLUE,
        linewidth=0.8,
        alpha=0.45,
        marker=marker(x),
        markersize=3,
        label="round",
    )
    if window > 1:
        label = f"mean of the last {window} rounds"
        axes.plot(x / unit.size, running_mean(loss, window), color=BLUE, linewidth=1.8, label=label)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    axes.set_xlim(left=0)
    axes.set(xlabel=TIME.axis_label(unit), ylabel="training loss (mean over delivered clients)")
    return figure


def new_figure(title: str, panels: int) -> tuple[Figure, list[Axes]]:
    """An Agg figure with panels side by side, each with a light grid."""
    figure = Figure(figsize=(7, 4.5) if panels == 1 else (10.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(textwrap.fill(title, 55 * panels + 15), fontsize=11, parse_math=False)
    axes = [figure.add_subplot(1, panels, 1 + panel) for panel in range(panels)]
    for each in axes:
        each.grid(color="0.9", linewidth=0.6)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def log_axis(axes: Axes, values: FloatArray) -> None:
    """Make x logarithmic with plain numbers at 1, 2 and 5, or at powers of ten where these would crowd."""
    axes.set_xscale("log")
    if not len(values):
        return
    low, high = values.min() / 1.3, values.max() * 1.3
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 2000 else (1,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def column(table: pa.Table, name: str) -> FloatArray:
    """A column as floats, with NaN for null."""
    values: FloatArray = table.column(name).cast(pa.float64()).to_numpy()
    return values


def curve(rounds: pa.Table, cost: Cost, name: str) -> tuple[FloatArray, FloatArray]:
    """Cost and value of the rounds in which the value was measured and finite; empty without such a column."""
    if name not in rounds.column_names:
        return np.empty(0), np.empty(0)
    values = column(rounds, name)
    measured: BoolArray = np.isfinite(values)
    return column(rounds, cost.column)[measured], values[measured]


def marker(x: FloatArray) -> str:
    """A dot on each value of a sparse curve; none on a dense one."""
    return "o" if len(x) <= _MOST_MARKERS else ""


def running_mean(values: FloatArray, window: int) -> FloatArray:
    """The mean of each value and those before it, `window` in all where there are as many."""
    total = np.cumsum(values)
    total[window:] -= total[:-window].copy()
    return total / np.minimum(np.arange(1, len(values) + 1), window)


def rank_colours(ranks: IntArray) -> FloatArray:
    """One RGBA colour for each ascending rank, dark to light, and vermillion for rank 0, which sends nothing."""
    sending = colormaps["viridis"](np.linspace(0.1, 0.9, int((ranks > 0).sum())))
    silent = np.tile(to_rgba(VERMILLION), (int((ranks == 0).sum()), 1))
    return np.concatenate([silent, sending])
