"""The figure of a partition of the data over the clients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from narrowcast.platform.tracking.figures import BLUE, add_panels, as_png, empty_figure, log_axis, new_figure
from narrowcast.platform.tracking.partition_counts import MOST_BARS, PartitionCounts
from narrowcast.platform.types import FloatArray, IntArray

_MOST_COLOURS, _MOST_BINS = 20, 40


def partition_png(counts: PartitionCounts) -> bytes:
    """Return a figure of what the clients have and how much: classes, numbers to predict, or interactions per item."""
    title = f"{counts.name}: {len(counts.examples):,} clients, {int(counts.examples.sum()):,} training examples"
    figure, panels = new_figure(title, panels=_n_panels(counts))
    _draw(figure, panels, counts)
    return as_png(figure)


def overview_png(partitions: Sequence[tuple[str, PartitionCounts]]) -> bytes:
    """Return the panels of `partition_png` for several partitions of one data set, a row for each."""
    first = partitions[0][1]
    columns, rows = _n_panels(first), len(partitions)
    title = f"{first.name}: partitions over {len(first.examples):,} clients"
    figure = empty_figure(title, 5.25 * columns, 0.5 + 2.6 * rows)
    for subfigure, (kind, counts) in zip(figure.subfigures(rows, 1, squeeze=False)[:, 0], partitions, strict=True):
        subfigure.suptitle(kind, fontsize=10, fontweight="bold", x=0.02, ha="left")
        _draw(subfigure, add_panels(subfigure, 1, columns), counts)
    return as_png(figure, 110)


def _n_panels(counts: PartitionCounts) -> int:
    return 1 if counts.targets is None else 2


def _draw(figure: Figure | SubFigure, panels: Sequence[Axes], counts: PartitionCounts) -> None:
    """Draw the targets of the clients, if there is a picture of them, and their numbers of examples."""
    match counts.targets:
        case "classes":
            table = np.asarray(counts.values, dtype=np.int64)
            few = len(table) <= MOST_BARS and table.shape[1] <= _MOST_COLOURS
            (_draw_bars if few else _draw_map)(figure, panels[0], table)
        case "classes held":
            _draw_variety(panels[0], np.asarray(counts.values))
        case "items":
            _draw_popularity(panels[0], np.asarray(counts.values))
        case "numbers":
            _draw_numbers(panels[0], [np.asarray(numbers) for numbers in counts.values])
        case "means":
            _draw_means(panels[0], np.asarray(counts.values))
    _draw_sizes(panels[-1], counts.examples)


def _draw_bars(figure: Figure | SubFigure, axes: Axes, counts: IntArray) -> None:
    """Draw a stacked bar per client."""
    n_clients, n_classes = counts.shape
    colours = _class_colours(n_classes)
    floor = np.zeros(n_clients)
    for label in range(n_classes):
        axes.bar(np.arange(n_clients), counts[:, label], bottom=floor, width=0.85, color=colours(label))
        floor += counts[:, label]
    axes.grid(axis="x", visible=False)
    axes.set_xlim(-0.7, n_clients - 0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="client", ylabel="training examples")
    shades = ScalarMappable(BoundaryNorm(np.arange(n_classes + 1) - 0.5, n_classes), colours)
    bar = figure.colorbar(shades, ax=axes, ticks=np.arange(n_classes), pad=0.02, aspect=30, label="class")
    bar.minorticks_off()
    bar.ax.tick_params(length=0)
    bar.outline.set_visible(False)


def _draw_map(figure: Figure | SubFigure, axes: Axes, counts: IntArray) -> None:
    """Draw a map of the share of each class in each client's examples; clients without examples are blank."""
    total = counts.sum(axis=1, keepdims=True)
    shares = np.divide(100 * counts, total, out=np.full(counts.shape, np.nan), where=total > 0)
    image = axes.imshow(shares, cmap="Blues", aspect="auto", interpolation="nearest", vmin=0)
    axes.grid(visible=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    axes.set(xlabel="class", ylabel="client")
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=30, label="share of the client's examples (%)")
    bar.outline.set_visible(False)


def _draw_variety(axes: Axes, held: IntArray) -> None:
    """Draw a histogram of the number of classes per client, for too many clients to show each."""
    shares = 100 * np.bincount(held) / len(held)
    shown = np.flatnonzero(shares)
    axes.bar(shown, shares[shown], width=0.85, color=BLUE)
    axes.grid(axis="x", visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlim(max(shown[0] - 2, -0.7), shown[-1] + 2)
    axes.set(xlabel="number of classes per client", ylabel="share of clients (%)")


def _draw_popularity(axes: Axes, counts: IntArray) -> None:
    """Draw the training interactions of each item, from the most to the least frequent."""
    counts = np.sort(counts)[::-1]
    used = counts[counts > 0]
    axes.plot(1 + np.arange(len(used)), used, color=BLUE)
    if len(used):
        log_axis(axes, np.arange(1, 1 + len(used), dtype=np.float64))
        log_axis(axes, used.astype(np.float64), "y")
    axes.set(xlabel="item, by rank", ylabel="training interactions of the item")
    if unseen := len(counts) - len(used):
        axes.set_title(f"{unseen:,} of {len(counts):,} items have none", fontsize=9)


def _draw_numbers(axes: Axes, values: Sequence[FloatArray]) -> None:
    """Draw a box for the numbers to predict of each client."""
    axes.boxplot(
        values, positions=np.arange(len(values)), widths=0.7, manage_ticks=False, medianprops={"color": BLUE},
        flierprops={"markersize": 2, "markeredgecolor": "0.5"},
    )  # fmt: skip
    axes.grid(axis="x", visible=False)
    axes.set_xlim(-0.7, len(values) - 0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="client", ylabel="number to predict")


def _draw_means(axes: Axes, means: FloatArray) -> None:
    """Draw a histogram of the means of many clients."""
    axes.hist(means.tolist(), bins=_MOST_BINS, color=BLUE)
    axes.set(xlabel="mean of the numbers to predict per client", ylabel="number of clients")


def _draw_sizes(axes: Axes, examples: IntArray) -> None:
    """Draw a histogram of the examples per client, on a logarithmic axis if they differ more than twentyfold."""
    sizes = examples[examples > 0].astype(np.float64)
    empty = len(examples) - len(sizes)
    if len(sizes):
        low, high = int(sizes.min()), int(sizes.max()) + 1
        bins = min(_MOST_BINS, 6 + math.isqrt(len(sizes)))
        logarithmic = high > 20 * low
        edges = np.geomspace(low, high, bins + 1) if logarithmic else np.linspace(low, high, bins + 1)
        # Edges between integers, so that no integer is split between bins.
        axes.hist(sizes, bins=(np.unique(np.round(edges)) - 0.5).tolist(), color=BLUE)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if logarithmic:
            log_axis(axes, sizes)
        else:
            axes.set_xlim(max(low - 2, -0.7), high + 1)
        mean = examples.mean()
        text = f"median {np.median(examples):,.0f}, mean {mean:,.1f}" if mean >= 10 else f"mean {mean:.2g}"
        axes.set_title(f"{text}; {empty:,} clients without any" if empty else text, fontsize=9)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set(xlabel="training examples per client", ylabel="number of clients")


def _class_colours(n_classes: int) -> ListedColormap:
    return ListedColormap(colormaps["tab10" if n_classes <= 10 else "tab20"](np.arange(n_classes)))
