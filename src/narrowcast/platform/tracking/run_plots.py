"""The figures of one run, drawn without pyplot, which would share state between threads."""

from __future__ import annotations

import io
import math
import textwrap
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from narrowcast.platform.disk import disk, make_folders
from narrowcast.platform.tracking.units import BYTE_UNITS, TIME_UNITS, Unit, axis_unit, format_percent
from narrowcast.platform.types import NO_RANK, BoolArray, FloatArray, IntArray

# Okabe and Ito's palette without yellow and pale blue, which are hard to see on white.
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, BLACK = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#000000",
)
METRICS = {"hr@10": ("HR@10", BLUE), "ndcg@10": ("NDCG@10", VERMILLION), "accuracy": ("accuracy", GREEN)}
_MOST_MARKERS, _MOST_RANK_LABELS = 40, 12


@dataclass(frozen=True)
class Cost:
    """The horizontal axis of an accuracy plot: a column that grows from round to round."""

    column: str
    label: str
    units: tuple[Unit, ...]


UPLINK = Cost("total_uplink_bits", "cumulative uplink", BYTE_UNITS)
TOTAL = Cost("total_bits", "cumulative uplink and downlink", BYTE_UNITS)
TIME = Cost("simulated_seconds", "simulated time", TIME_UNITS)


def run_figures(rounds: pa.Table, clients: pa.Table, title: str) -> dict[str, Figure]:
    """Return the figures of a run by name, without those for which nothing was measured."""
    figures = {
        "accuracy_uplink": accuracy_figure(rounds, UPLINK, f"{title}: accuracy against uplink"),
        "accuracy_total": accuracy_figure(rounds, TOTAL, f"{title}: accuracy against total traffic"),
        "accuracy_time": accuracy_figure(rounds, TIME, f"{title}: accuracy against simulated time"),
        "client_bits_ranks": client_figure(clients, f"{title}: ranks and uplink of the clients"),
        "loss_time": loss_figure(rounds, f"{title}: training loss"),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def draw_plots(rounds: pa.Table, clients: pa.Table, folder: Path, title: str) -> list[Path]:
    """Write the figures of a run as PNG files and return their paths."""
    make_folders(folder)
    figures = run_figures(rounds, clients, title)
    for name, figure in figures.items():
        disk().fill(folder / f"{name}.png", partial(figure.savefig, dpi=150))
    return [folder / f"{name}.png" for name in figures]


def accuracy_figure(rounds: pa.Table, cost: Cost, title: str) -> Figure | None:
    """Return HR@10 and NDCG@10, or accuracy, against a cost; None if no test metric was measured."""
    figure, (axes,) = new_figure(title, panels=1)
    measured = [metric for metric in METRICS if len(curve(rounds, cost, f"test.{metric}")[0])]
    if not measured:
        return None
    last = max(curve(rounds, cost, f"test.{metric}")[0][-1] for metric in measured)
    unit = axis_unit(cost.units, last)
    for metric in measured:
        label, colour = METRICS[metric]
        x, y = curve(rounds, cost, f"validation.{metric}")
        if len(x):
            faint = axes.plot(x / unit.size, 100 * y, "--", color=colour, linewidth=1, alpha=0.45)[0]
            faint.set(marker=marker(x), markersize=2, label=f"{label}, validation")
        x, y = curve(rounds, cost, f"test.{metric}")
        strong = axes.plot(x / unit.size, 100 * y, color=colour, linewidth=1.8)[0]
        strong.set(marker=marker(x), markersize=4, label=f"{label}, test")
        # HR@10 is never below NDCG@10, so labels on opposite sides of their points cannot overlap.
        side = (8, -2, "top") if metric == "ndcg@10" else (8, 2, "bottom")
        text = axes.annotate(
            format_percent(y[-1]), (x[-1] / unit.size, 100 * y[-1]), side[:2], textcoords="offset points"
        )
        text.set(color=colour, va=side[2], fontsize=9, fontweight="bold")
    axes.set_xlim(0, 1.15 * last / unit.size or 1)  # the margin is for the annotations
    axes.margins(y=0.12)
    axes.set(xlabel=f"{cost.label} ({unit.symbol})", ylabel="accuracy (%)")
    figure.legend(loc="outside lower center", ncols=len(measured), frameon=False, fontsize=9)
    return figure


def client_figure(clients: pa.Table, title: str) -> Figure | None:
    """Return the distribution of ranks, and uplink per participation against link rate; None without participations."""
    if not clients.num_rows:
        return None
    figure, (bars, points) = new_figure(title, panels=2)
    chosen = column(clients, "rank").astype(np.int64)
    ranks, place, counts = np.unique(chosen, return_inverse=True, return_counts=True)
    shares, colours = 100 * counts / counts.sum(), rank_colours(ranks)

    bars.bar(np.arange(len(ranks)), shares, width=0.8, color=colours)
    bars.grid(axis="x", visible=False)
    shown = np.arange(0, len(ranks), math.ceil(len(ranks) / _MOST_RANK_LABELS))
    bars.set_xticks(shown, ["full" if rank == NO_RANK else str(rank) for rank in ranks[shown]])
    for index in shown.tolist():
        share = f"{shares[index]:.1f}" if shares[index] >= 0.1 else "<0.1"
        bars.text(index, shares[index], share, ha="center", va="bottom", fontsize=8)
    middle, half = (len(ranks) - 1) / 2, max(len(ranks), 5) / 2
    bars.set_xlim(middle - half, middle + half)
    bars.set(ylabel="share of participations (%)", ylim=(0, 1.1 * shares.max()))
    bars.set_xlabel("rank (0: nothing sent)" if ranks[0] == 0 else "rank")

    # The more participations share a rank, the fainter its points, so that rare ranks stay visible.
    colours[:, 3] = np.clip(3000 / counts, 0.12, 0.8)
    rate = column(clients, "uplink_bits_per_second") / 1e6
    sent = column(clients, "uplink_bits") / 8e3
    usable = np.isfinite(rate) & (rate > 0)
    points.scatter(rate[usable], sent[usable], s=8, c=colours[place[usable]], linewidths=0, rasterized=True)
    log_axis(points, rate[usable])
    points.set_ylim(bottom=min(0.0, points.get_ylim()[0]))
    points.set(xlabel="client's uplink rate (Mbit/s)", ylabel="uplink per participation (kB)")
    points.set_title("colour: rank, as on the left", fontsize=9)
    return figure


def loss_figure(rounds: pa.Table, title: str) -> Figure | None:
    """Return the training loss per round and its running mean against simulated time; None if no loss is finite."""
    x, loss = curve(rounds, TIME, "loss")
    if not len(x):
        return None
    figure, (axes,) = new_figure(title, panels=1)
    unit = axis_unit(TIME.units, x[-1])
    raw = axes.plot(x / unit.size, loss, color=BLUE, linewidth=0.8, alpha=0.45, label="each round")[0]
    raw.set(marker=marker(x), markersize=3)
    if window := len(loss) // 40 * 2:
        label = f"running mean of {window + 1} rounds"
        axes.plot(x / unit.size, running_mean(loss, window + 1), color=BLUE, linewidth=1.8, label=label)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    axes.set_xlim(0, 1.03 * x[-1] / unit.size or 1)
    axes.set_xlabel(f"{TIME.label} ({unit.symbol})")
    axes.set_ylabel("training loss (mean over clients that delivered)")
    return figure


class NotebookFigure(Figure):
    """A figure that notebooks show, although pyplot does not know it."""

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.savefig(content, format="png", dpi=100)
        return content.getvalue()


def new_figure(title: str, panels: int) -> tuple[Figure, list[Axes]]:
    """Return an Agg figure with panels side by side, each with a light grid."""
    figure = NotebookFigure((7 if panels == 1 else 5.25 * panels, 4.5))
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.04))
    FigureCanvasAgg(figure)
    figure.suptitle(textwrap.fill(title, 70 * panels), fontsize=11, parse_math=False)
    axes = [figure.add_subplot(1, panels, 1 + panel) for panel in range(panels)]
    for each in axes:
        each.grid(color="0.9", linewidth=0.6)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def log_axis(axes: Axes, values: FloatArray) -> None:
    """Make x logarithmic, with ticks at 1, 2 and 5, or at powers of ten only for a wide range."""
    axes.set_xscale("log")
    if not len(values):
        return
    low, high = values.min() / 1.3, values.max() * 1.3
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1500 else (1,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def column(table: pa.Table, name: str) -> FloatArray:
    """Return a column as floats, with NaN for null."""
    values: FloatArray = table.column(name).cast(pa.float64()).to_numpy()
    return values


def curve(rounds: pa.Table, cost: Cost, name: str) -> tuple[FloatArray, FloatArray]:
    """Return cost and value of the rounds with a finite value; empty without such a column."""
    if name not in rounds.column_names or cost.column not in rounds.column_names:
        return np.empty(0), np.empty(0)
    values = column(rounds, name)
    measured: BoolArray = np.isfinite(values)
    return column(rounds, cost.column)[measured], values[measured]


def marker(x: FloatArray) -> str:
    """Return the marker of a curve: a dot if it has few points, none otherwise."""
    return "o" if len(x) <= _MOST_MARKERS else ""


def running_mean(values: FloatArray, window: int) -> FloatArray:
    """Return the mean over an odd window centred on each value, truncated at the ends."""
    ones = np.ones(window)
    return np.convolve(values, ones, "same") / np.convolve(np.ones_like(values), ones, "same")


def rank_colours(ranks: IntArray) -> FloatArray:
    """Return an RGBA colour per ascending rank, dark to light; vermillion for 0 (nothing sent), blue for full."""
    sending = colormaps["viridis"](np.linspace(0.1, 0.9, int((ranks > 0).sum())))
    silent = np.tile(to_rgba(VERMILLION), (int((ranks == 0).sum()), 1))
    whole = np.tile(to_rgba(BLUE), (int((ranks == NO_RANK).sum()), 1))
    return np.concatenate([whole, silent, sending])
