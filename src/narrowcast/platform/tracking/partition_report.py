"""The partition of the data over the clients, as a small table and a figure, for any number of clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from narrowcast.platform.contracts import Dataset
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.disk import disk, make_folders
from narrowcast.platform.tracking.run_plots import BLUE, add_panels, empty_figure, log_axis, new_figure
from narrowcast.platform.types import IntArray

TABLE, FIGURE, OVERVIEW = "partition.parquet", "partition.png", "partitions.png"
MOST_ROWS, MOST_CELLS = 1000, 100_000
"""Above either limit the table is a summary; a cell is a client's count of one class."""
_MOST_BARS, _MOST_COLOURS, _MOST_BINS = 50, 20, 40
_QUANTILES = {"min": 0.0, "p05": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}


def write_partition(data: Dataset, folder: Path) -> list[Path]:
    """Write `partition.parquet` and `partition.png` into the folder, each below 200 kB, and return their paths."""
    make_folders(folder)
    disk().fill(folder / TABLE, partial(pq.write_table, partition_table(data), compression="zstd"))
    disk().fill(folder / FIGURE, partial(partition_figure(data).savefig, dpi=150))
    return [folder / TABLE, folder / FIGURE]


def write_overview(partitions: Sequence[tuple[str, Dataset]], folder: Path) -> Path:
    """Write `partitions.png`, the figures of several partitions of one data set in one, and return its path."""
    make_folders(folder)
    disk().fill(folder / OVERVIEW, partial(overview_figure(partitions).savefig, dpi=110))
    return folder / OVERVIEW


def partition_table(data: Dataset) -> pa.Table:
    """Return one row per client with its examples and its count of each class; for many clients a summary.

    The summary has one row for the examples, one for the number of classes per client, and one for each class, with
    mean, quantiles and the number of clients without any.
    """
    n_classes = data.n_classes if has_classes(data) else 0
    if data.n_clients <= MOST_ROWS and data.n_clients * n_classes <= MOST_CELLS:
        columns = {"client": np.arange(data.n_clients), "examples": data.examples}
        if has_classes(data):
            columns |= {f"class_{label}": counts for label, counts in enumerate(class_counts(data).T)}
        return pa.table({name: values.astype(np.int32) for name, values in columns.items()})
    rows = [_summary("examples", data.examples)]
    if has_classes(data):
        clients, labels = owners(data), data.train.labels[data.order]
        rows.append(_summary("classes", classes_held(data)))
        for label in range(n_classes):
            counts = np.bincount(clients[labels == label], minlength=data.n_clients)
            rows.append(_summary(f"class_{label}", counts))
    return pa.Table.from_pylist(rows)


def partition_figure(data: Dataset) -> Figure:
    """Return a figure of what the clients have and how much: classes, numbers to predict, or interactions per item."""
    title = f"{data.name}: {data.n_clients:,} clients, {int(data.examples.sum()):,} training examples"
    figure, panels = new_figure(title, panels=_n_panels(data))
    _draw(figure, panels, data)
    return figure


def overview_figure(partitions: Sequence[tuple[str, Dataset]]) -> Figure:
    """Return the panels of `partition_figure` for several partitions of one data set, a row for each."""
    data = partitions[0][1]
    columns, rows = _n_panels(data), len(partitions)
    title = f"{data.name}: partitions over {data.n_clients:,} clients"
    figure = empty_figure(title, 5.25 * columns, 0.5 + 2.6 * rows)
    for place, (kind, partitioned) in zip(figure.subfigures(rows, 1, squeeze=False)[:, 0], partitions, strict=True):
        place.suptitle(kind, fontsize=10, fontweight="bold", x=0.02, ha="left")
        _draw(place, add_panels(place, 1, columns), partitioned)
    return figure


def _n_panels(data: Dataset) -> int:
    return 2 if has_classes(data) or isinstance(data, Interactions) or _has_numbers(data) else 1


def _draw(figure: Figure | SubFigure, panels: Sequence[Axes], data: Dataset) -> None:
    """Draw the targets of the clients, if there is a picture of them, and their numbers of examples."""
    if has_classes(data):
        if data.n_clients <= _MOST_BARS and data.n_classes <= _MOST_COLOURS:
            _draw_bars(figure, panels[0], class_counts(data))
        elif data.n_clients <= MOST_ROWS and data.n_clients * data.n_classes <= MOST_CELLS:
            _draw_map(figure, panels[0], class_counts(data))
        else:
            _draw_variety(panels[0], classes_held(data))
    elif isinstance(data, Interactions):
        _draw_popularity(panels[0], np.bincount(data.items, minlength=data.n_items))
    elif _has_numbers(data):
        _draw_numbers(panels[0], data)
    _draw_sizes(panels[-1], data.examples)


def has_classes(data: Dataset) -> TypeGuard[Samples]:
    """Return whether the data has samples of classes; tokens and numbers are shown by the sizes of the clients."""
    return isinstance(data, Samples) and data.targets == "classes"


def _has_numbers(data: Dataset) -> TypeGuard[Samples]:
    return isinstance(data, Samples) and data.targets == "numbers"


def owners(data: Samples) -> IntArray:
    """Return the client of each entry of `data.order`."""
    return np.repeat(np.arange(data.n_clients), data.examples)


def class_counts(data: Samples) -> IntArray:
    """Return the number of samples of each class per client, [U, classes]."""
    cells = owners(data) * data.n_classes + data.train.labels[data.order]
    return np.bincount(cells, minlength=data.n_clients * data.n_classes).reshape(data.n_clients, data.n_classes)


def classes_held(data: Samples) -> IntArray:
    """Return the number of different classes per client, [U], in memory proportional to the samples."""
    cells = np.unique(owners(data) * data.n_classes + data.train.labels[data.order])
    return np.bincount(cells // data.n_classes, minlength=data.n_clients)


def _summary(measure: str, values: IntArray) -> dict[str, str | float | int]:
    quantiles = np.quantile(values, list(_QUANTILES.values())).tolist()
    return {
        "measure": measure,
        "clients_without": int((values == 0).sum()),
        "mean": float(values.mean()),
        **dict(zip(_QUANTILES, quantiles, strict=True)),
    }


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
    some = counts[counts > 0]
    axes.plot(1 + np.arange(len(some)), some, color=BLUE)
    if len(some):
        log_axis(axes, np.arange(1, 1 + len(some), dtype=np.float64))
        log_axis(axes, some.astype(np.float64), "y")
    axes.set(xlabel="item, by rank", ylabel="training interactions of the item")
    if unseen := len(counts) - len(some):
        axes.set_title(f"{unseen:,} of {len(counts):,} items have none", fontsize=9)


def _draw_numbers(axes: Axes, data: Samples) -> None:
    """Draw the first number to predict: a box for each client, or a histogram of the means of many clients."""
    values = np.split(data.train.labels[data.order, 0], data.indptr[1:-1])
    if data.n_clients <= _MOST_BARS:
        axes.boxplot(
            values, positions=np.arange(data.n_clients), widths=0.7, manage_ticks=False, medianprops={"color": BLUE},
            flierprops={"markersize": 2, "markeredgecolor": "0.5"},
        )  # fmt: skip
        axes.grid(axis="x", visible=False)
        axes.set_xlim(-0.7, data.n_clients - 0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="client", ylabel="number to predict")
        return
    axes.hist([float(each.mean()) for each in values if len(each)], bins=_MOST_BINS, color=BLUE)
    axes.set(xlabel="mean of the numbers to predict per client", ylabel="number of clients")


def _draw_sizes(axes: Axes, examples: IntArray) -> None:
    """Draw a histogram of the examples per client, on a logarithmic axis if they differ more than twentyfold."""
    some = examples[examples > 0].astype(np.float64)
    empty = len(examples) - len(some)
    if len(some):
        low, high = int(some.min()), int(some.max()) + 1
        bins = min(_MOST_BINS, 6 + math.isqrt(len(some)))
        logarithmic = high > 20 * low
        edges = np.geomspace(low, high, bins + 1) if logarithmic else np.linspace(low, high, bins + 1)
        # Edges between integers, so that no integer is split between bins.
        axes.hist(some, bins=(np.unique(np.round(edges)) - 0.5).tolist(), color=BLUE)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if logarithmic:
            log_axis(axes, some)
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
