"""The figures of one run or solve, from its tables, drawn without pyplot, which would share state between threads."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from PIL import Image

from narrowcast.platform.errors import printable
from narrowcast.platform.rounds.ledger import NO_RANK
from narrowcast.platform.storage.journal import CLIENT_METRICS, CLIENTS, ROUNDS
from narrowcast.platform.tracking.metrics import (
    ITERATIONS,
    NEW,
    ROUND,
    SOLVER_TIME,
    SPLITS,
    TIME,
    TOTAL,
    UPLINK,
    Cost,
    FractionMetrics,
    LowerIsBetter,
    column,
    curve,
    format_metric,
    is_fraction,
    metric_label,
    metrics_of,
    running_mean,
)
from narrowcast.platform.tracking.units import axis_unit
from narrowcast.platform.types import ITERATION_COLUMNS, FloatArray, IntArray

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
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, BLACK)
_MOST_MARKERS, _MOST_RANK_LABELS, _MOST_PANELS = 40, 12, 3
_NARROW = 3.0  # ratio below which a logarithmic axis has fewer than two ticks at 1, 2 and 5


def as_png(figure: Figure, dots_per_inch: float = 150) -> bytes:
    """Return a figure as a PNG file."""
    content, before, canvas = io.BytesIO(), figure.dpi, FigureCanvasAgg(figure)
    figure.set_dpi(dots_per_inch)
    # `savefig` would draw everything twice, the first time for the layout alone.
    canvas.draw()  # type: ignore[no-untyped-call]
    figure.set_dpi(before)
    pixels = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")  # type: ignore[no-untyped-call]
    pixels.save(content, "PNG", dpi=(dots_per_inch, dots_per_inch))
    return content.getvalue()


def accuracy_figure(rounds: pa.Table, cost: Cost, title: str, declared: LowerIsBetter = None) -> Figure | None:
    """Return the test metrics, validation fainter, against a cost; None if no test metric was measured.

    Shares, as `declared`, have one panel in percent, and every other metric one of its own. The loss is drawn
    if there is nothing else.
    """
    measured = [name for name in metrics_of(rounds.column_names) if len(curve(rounds, cost, f"test.{name}")[0])]
    measured = [name for name in measured if name != "loss"] or measured
    if not measured:
        return None
    shares = [name for name in measured if is_fraction(name, declared)]
    grouped = [*([shares] if shares else []), *([name] for name in measured if name not in shares)][:_MOST_PANELS]
    figure, panels = new_figure(title, panels=len(grouped))
    for axes, metrics in zip(panels, grouped, strict=True):
        _draw_metrics(axes, rounds, cost, metrics, declared)
    labelled = [line for axes in panels for line in axes.lines]
    columns = sum(map(len, grouped))
    figure.legend(handles=labelled, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return figure


def _draw_metrics(axes: Axes, rounds: pa.Table, cost: Cost, metrics: list[str], declared: LowerIsBetter) -> None:
    """Draw metrics of one scale, each with its last value."""
    last = max(curve(rounds, cost, f"test.{metric}")[0][-1] for metric in metrics)
    unit = axis_unit(cost.units, last)
    percent = is_fraction(metrics[0], declared)
    scale = 100 if percent else 1
    for index, metric in enumerate(metrics):
        label, colour = metric_label(metric), METRICS.get(metric, ("", COLOURS[(index + 2) % len(COLOURS)]))[1]
        x, y = curve(rounds, cost, f"validation.{metric}")
        if len(x):
            faint = axes.plot(x / unit.size, scale * y, "--", color=colour, linewidth=1, alpha=0.45)[0]
            faint.set(marker=marker(x), markersize=2, label=f"{label}, validation")
        x, y = curve(rounds, cost, f"test.{metric}")
        strong = axes.plot(x / unit.size, scale * y, color=colour, linewidth=1.8)[0]
        strong.set(marker=marker(x), markersize=4, label=f"{label}, test")
        # HR@10 is never below NDCG@10, so labels on opposite sides of their points cannot overlap.
        side = (8, -2, "top") if metric == "ndcg@10" else (8, 2, "bottom")
        text = axes.annotate(
            format_metric(metric, float(y[-1]), declared),
            (x[-1] / unit.size, scale * y[-1]),
            side[:2],
            textcoords="offset points",
        )
        text.set(color=colour, va=side[2], fontsize=9, fontweight="bold")
    axes.set_xlim(0, 1.15 * last / unit.size or 1)  # the margin is for the annotations
    axes.margins(y=0.12)
    if cost is ROUND:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    shown = " and ".join(map(metric_label, metrics))
    axes.set(xlabel=cost.axis_label(unit), ylabel=f"{shown} (%)" if percent else shown)


def client_figure(clients: pa.Table, title: str) -> Figure | None:
    """Return the distribution of ranks, and uplink per participation against link rate.

    A panel on which all participations would be the same is left out; None if both are.
    """
    chosen = column(clients, "rank").astype(np.int64)
    ranks, group, counts = np.unique(chosen, return_inverse=True, return_counts=True)
    shares, colours = 100 * counts / counts.sum(), rank_colours(ranks)
    rate = column(clients, "uplink_bits_per_second") / 1e6
    sent = column(clients, "uplink_bits") / 8e3
    usable = np.isfinite(rate) & (rate > 0)
    scattered = len(np.unique(np.stack([rate[usable], sent[usable]]), axis=1).T) > 1
    drawn = [*(["ranks"] if len(ranks) > 1 else []), *(["uplink"] if scattered else [])]
    if not drawn:
        return None
    figure, panels = new_figure(f"{title}: {' and '.join(drawn)} of the clients", panels=len(drawn))
    if len(ranks) > 1:
        bars = panels[0]
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
    if scattered:
        points = panels[-1]
        # The more participations share a rank, the fainter its points, so that rare ranks stay visible.
        colours[:, 3] = np.clip(3000 / counts, 0.12, 0.8)
        points.scatter(rate[usable], sent[usable], s=8, c=colours[group[usable]], linewidths=0, rasterized=True)
        log_axis(points, rate[usable])
        points.set_ylim(bottom=min(0.0, points.get_ylim()[0]))
        points.set(xlabel="client's uplink rate (Mbit/s)", ylabel="uplink per participation (kB)")
        if len(ranks) > 1:
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
    """A figure that notebooks show, although pyplot does not know it; its texts are shown as they are.

    Names in them may be from files of others, in which a `$` does not begin a formula.
    """

    def _repr_png_(self) -> bytes:
        return as_png(self, 100)

    def draw(self, renderer: RendererBase) -> None:
        """Draw the figure."""
        for text in _texts(self):
            text.set_parse_math(False)
            text.set_text(printable(text.get_text(), "\n"))
        super().draw(renderer)


def _texts(figure: Figure | SubFigure) -> Iterator[Text]:
    """Yield the texts of a figure; of ticks those that are named, since Matplotlib writes powers as formulas."""
    for artist in figure.get_children():
        if isinstance(artist, SubFigure):
            yield from _texts(artist)
        elif not isinstance(artist, Axes):
            yield from artist.findobj(Text)
    for axes in figure.axes:
        for part in axes.get_children():
            if not isinstance(part, Axis):
                yield from part.findobj(Text)
                continue
            yield part.label
            if isinstance(part.get_major_formatter(), FixedFormatter | FuncFormatter):
                yield from part.get_ticklabels()


def new_figure(title: str, panels: int) -> tuple[Figure, list[Axes]]:
    """Return an Agg figure with panels side by side, four of them in two rows, each with a light grid."""
    rows = 2 if panels == 4 else 1
    columns = -(-panels // rows)
    figure = empty_figure(title, 7 if panels == 1 else 5.25 * columns, 4.5 if rows == 1 else 8)
    return figure, add_panels(figure, rows, columns)[:panels]


def empty_figure(title: str, width: float, height: float) -> Figure:
    """Return an Agg figure of so many inches with a title and no panel."""
    figure = NotebookFigure((width, height))
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.04))
    FigureCanvasAgg(figure)
    characters = 70 if width <= 7 else int(60 / 5.25 * width)
    figure.suptitle(textwrap.fill(title, characters), fontsize=11)
    return figure


def add_panels(figure: Figure | SubFigure, rows: int, columns: int) -> list[Axes]:
    """Return axes in rows and columns, each with a light grid."""
    axes = [figure.add_subplot(rows, columns, 1 + index) for index in range(rows * columns)]
    for axis in axes:
        axis.grid(color="0.9", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return axes


def log_axis(axes: Axes, values: FloatArray, which: Literal["x", "y"] = "x") -> None:
    """Make an axis logarithmic: ticks at 1, 2 and 5, powers of ten for a wide range, even steps for a narrow one."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    if not len(values):
        return
    low, high = values.min() / 1.3, values.max() * 1.3
    (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)
    if values.max() / values.min() < _NARROW:
        axis.set_major_locator(MaxNLocator(5))
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1500 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_locator(NullLocator())


def marker(x: FloatArray) -> str:
    """Return the marker of a curve: a dot if it has few points, none otherwise."""
    return "o" if len(x) <= _MOST_MARKERS else ""


def rank_colours(ranks: IntArray) -> FloatArray:
    """Return an RGBA colour per ascending rank, dark to light; vermillion for 0 (nothing sent), blue for full."""
    sending = colormaps["viridis"](np.linspace(0.1, 0.9, int((ranks > 0).sum())))
    silent = np.tile(to_rgba(VERMILLION), (int((ranks == 0).sum()), 1))
    full = np.tile(to_rgba(BLUE), (int((ranks == NO_RANK).sum()), 1))
    return np.concatenate([full, silent, sending])


_BANDS = ((10, 90, 0.15), (25, 75, 0.3))
_MOST_BINS = 20


def client_metrics_figures(metrics: pa.Table, title: str, shares: FractionMetrics = None) -> dict[str, Figure]:
    """Return the figure `client_metrics` of the rows of `client_metrics.parquet`; none if no client has samples."""
    name = shown_metric(metrics)
    if name is None:
        return {}
    rounds, values = column(metrics, "round"), column(metrics, name)
    evaluated = np.unique(rounds[np.isfinite(values)])
    panels = 2 if len(evaluated) > 1 else 1
    figure, axes = new_figure(f"{title}: {metric_label(name)} of the clients", panels=panels)
    percent = is_fraction(name, shares)
    scale = 100 if percent else 1
    if panels == 2:
        by_round = [scale * values[(rounds == number) & np.isfinite(values)] for number in evaluated]
        _draw_bands(axes[0], evaluated, by_round)
        axes[0].set(xlabel="round", ylabel=_axis_label(name, percent))
    of_last = {
        column_name: scale * shown[np.isfinite(shown)]
        for column_name in (name, f"{NEW}{name}")
        if column_name in metrics.column_names
        for shown in [column(metrics, column_name)[rounds == evaluated[-1]]]
    }
    _draw_histogram(axes[-1], of_last[name], of_last.get(f"{NEW}{name}"), bounded=percent)
    axes[-1].set(xlabel=f"{_axis_label(name, percent)}, round {evaluated[-1]:.0f}", ylabel="number of clients")
    by_label = {
        label: handle for panel in axes[::-1] for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend([*by_label.values()], [*by_label], loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return {"client_metrics": figure}


def shown_metric(metrics: pa.Table) -> str | None:
    """Return the metric, named `split.metric`, whose distribution is shown; None if no client has samples.

    The first metric of test, else of validation or train, that has more than two values: the HR of a single held-out
    item is 0 or 1. Without one, the first.
    """
    names = [
        f"{split}.{name}" for split in SPLITS for name in metrics_of(metrics.column_names, split) if name != "loss"
    ]
    names += [f"{split}.loss" for split in SPLITS if f"{split}.loss" in metrics.column_names]
    counts = {name: len(np.unique(values[np.isfinite(values)])) for name in names for values in [column(metrics, name)]}
    measured = [name for name in names if counts[name]]
    return next((name for name in measured if counts[name] > 2), next(iter(measured), None))


def percentiles(metrics: pa.Table, name: str, at: FloatArray) -> FloatArray | None:
    """Return percentiles of a metric over the clients in the last round that evaluated it; None if none did."""
    if name not in metrics.column_names:
        return None
    rounds, values = column(metrics, "round"), column(metrics, name)
    finite = np.isfinite(values)
    if not finite.any():
        return None
    levels: FloatArray = np.percentile(values[finite & (rounds == rounds[finite].max())], at)
    return levels


def _axis_label(name: str, percent: bool) -> str:
    return f"{metric_label(name)} of a client" + (" (%)" if percent else "")


def _draw_bands(axes: Axes, rounds: FloatArray, by_round: list[FloatArray]) -> None:
    for low, high, alpha in _BANDS:
        edges = np.array([np.percentile(values, [low, high]) for values in by_round])
        label = f"{low}th to {high}th percentile"
        axes.fill_between(rounds, edges[:, 0], edges[:, 1], color=BLUE, alpha=alpha, linewidth=0, label=label)
    median, mean = (np.array([of(values) for values in by_round]) for of in (np.median, np.mean))
    dots = marker(rounds)
    axes.plot(rounds, median, color=BLUE, linewidth=1.8, marker=dots, markersize=3, label="median")
    axes.plot(rounds, mean, "--", color=VERMILLION, linewidth=1.5, marker=dots, markersize=3, label="mean")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _draw_histogram(axes: Axes, values: FloatArray, of_new: FloatArray | None, *, bounded: bool) -> None:
    bins = min(_MOST_BINS, max(5, int(np.sqrt(len(values)) * 2)))
    _, edges, _ = axes.hist(values, bins=bins, range=(0, 100) if bounded else None, color=BLUE, alpha=0.7)
    if of_new is not None and len(of_new):
        within = of_new.clip(edges[0], edges[-1])  # the bins are those of the other clients
        axes.hist(within, bins=edges.tolist(), histtype="step", color="black", linewidth=1.5, label="new clients")
    axes.axvline(float(values.mean()), color=VERMILLION, linestyle="--", linewidth=1.5, label="mean")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))


_MOST_METRICS = 5
_DASHES = ("-", "--", ":")


def solve_figures(table: pa.Table, title: str) -> dict[str, Figure]:
    """Return the figures of a solve by name: residual and metrics by iteration and against the time of the solver."""
    return {
        "error_iteration": error_figure(table, ITERATIONS, f"{title}: by iteration"),
        "error_time": error_figure(table, SOLVER_TIME, f"{title}: against the time of the solver"),
    }


def error_figure(table: pa.Table, cost: Cost, title: str) -> Figure:
    """Return the residual and the metrics against a cost, on a logarithmic axis if all values are positive."""
    figure, (axes,) = new_figure(title, panels=1)
    metrics = [name for name in table.column_names if name not in ITERATION_COLUMNS]
    curves = {name: curve(table, cost, name) for name in ("residual", *metrics[:_MOST_METRICS])}
    drawn = {name: (x, y) for name, (x, y) in curves.items() if len(x)}
    unit = axis_unit(cost.units, max(x[-1] for x, _ in drawn.values()))
    for (name, (x, y)), colour in zip(drawn.items(), COLOURS, strict=False):
        faint = name == "residual"  # it has a value in every row, and the solver's own scale
        line = axes.plot(x / unit.size, y, color=colour, linewidth=1 if faint else 1.8)[0]
        line.set(marker="" if faint else marker(x), markersize=4, label=metric_label(name))
    if min(y.min() for _, y in drawn.values()) > 0:
        axes.set_yscale("log")
    axes.set_xlabel(cost.axis_label(unit))
    figure.legend(handles=list(axes.lines), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def comparison_of_solves(tables: Mapping[str, pa.Table], costs: Sequence[Cost], name: str) -> Figure:
    """Return a metric of several solves, given their tables by label, with a panel for each cost."""
    shown = metric_label(name)
    figure, panels = new_figure(f"{shown[0].upper()}{shown[1:]} of the solves", panels=len(costs))
    for cost, axes in zip(costs, panels, strict=True):
        curves = {label: curve(table, cost, name) for label, table in tables.items()}
        drawn = {label: (x, y) for label, (x, y) in curves.items() if len(x)}
        unit = axis_unit(cost.units, max((x[-1] for x, _ in drawn.values()), default=1.0))
        for index, (label, (x, y)) in enumerate(drawn.items()):
            dashes = _DASHES[index // len(COLOURS) % len(_DASHES)]
            line = axes.plot(x / unit.size, y, dashes, color=COLOURS[index % len(COLOURS)], linewidth=1.5)[0]
            line.set(marker=marker(x), markersize=3, label=label)
        if drawn and min(y.min() for _, y in drawn.values()) > 0:
            axes.set_yscale("log")
        axes.set(xlabel=cost.axis_label(unit), ylabel=shown)
    handles = list(panels[0].lines)
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False, fontsize=9)
    return figure


def run_figures(
    rounds: pa.Table,
    clients: pa.Table,
    title: str,
    client_metrics: pa.Table | None = None,
    shares: FractionMetrics = None,
) -> dict[str, Figure]:
    """Return the figures of a run by name, without those for which nothing was measured.

    `shares` are the metrics that the model declares as such.
    """
    figures = {
        "accuracy_round": accuracy_figure(rounds, ROUND, f"{title}: test metrics by round", shares),
        "accuracy_uplink": accuracy_figure(rounds, UPLINK, f"{title}: test metrics against uplink", shares),
        "accuracy_total": accuracy_figure(rounds, TOTAL, f"{title}: test metrics against total traffic", shares),
        "accuracy_time": accuracy_figure(rounds, TIME, f"{title}: test metrics against simulated time", shares),
        "client_bits_ranks": client_figure(clients, title),
        "loss_time": loss_figure(rounds, f"{title}: training loss"),
        **({} if client_metrics is None else client_metrics_figures(client_metrics, title, shares)),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def figures_of_files(tables: Mapping[str, Path], title: str, shares: FractionMetrics = None) -> dict[str, bytes]:
    """Return the figures of a run as PNG files by name, given the files of its tables."""
    read = {name: pq.read_table(path) for name, path in tables.items()}
    figures = run_figures(read[ROUNDS], read[CLIENTS], title, read.get(CLIENT_METRICS), shares)
    return {name: as_png(figure) for name, figure in figures.items()}


def solve_figures_of_file(path: Path, title: str) -> dict[str, bytes]:
    """Return the figures of a solve as PNG files by name, given the file of its iterations."""
    return {name: as_png(figure) for name, figure in solve_figures(pq.read_table(path), title).items()}
