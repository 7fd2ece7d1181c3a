"""The partition of the data over the clients, as a table and a figure for any number of clients.

The partition of the data over the clients, as a small table and a figure, for any number of clients.

The counts that the figure of a partition shows: little, whatever the size of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from narrowcast.platform.contracts import Dataset
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.storage.disk import disk, make_folders
from narrowcast.platform.tracking.second_process import begin, call, partition_figure
from narrowcast.platform.types import FloatArray, IntArray

MOST_BARS = 50
"""Clients that have a bar, or a box, each."""


@dataclass(frozen=True)
class PartitionCounts:
    """The counts of each client. `targets` says what `values` are; None if targets have no picture."""

    name: str
    examples: IntArray
    """Training examples per client, [U]."""
    targets: Literal["classes", "classes held", "items", "numbers", "means"] | None
    values: IntArray | Sequence[FloatArray]
    """Examples of each class per client, [U, classes]; number of classes per client, [U]; interactions per item; the
    numbers to predict, for each client; or their means per client."""


def no_values() -> IntArray:
    """Return the `values` of a partition whose targets have no picture."""
    return np.zeros(0, dtype=np.int64)


TABLE, FIGURE, OVERVIEW = "partition.parquet", "partition.png", "partitions.png"
MOST_ROWS, MOST_CELLS = 1000, 100_000
"""Above either limit the table is a summary; a cell is a client's count of one class."""
_QUANTILES = {"min": 0.0, "p05": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}


def begin_figure(data: Dataset) -> Callable[[], bytes]:
    """Begin to draw the figure if there is a second process; return the function that returns it as a PNG file."""
    return begin(partition_figure.partition_png, partition_counts(data))


def write_partition(data: Dataset, folder: Path, figure: Callable[[], bytes] | None = None) -> list[Path]:
    """Write `partition.parquet` and `partition.png` into the folder, each below 200 kB, and return their paths.

    `figure` is what `begin_figure` returned, if that was called.
    """
    make_folders(folder)
    disk().fill(folder / TABLE, partial(pq.write_table, partition_table(data), compression="zstd"))
    disk().fill(folder / FIGURE, partial(Path.write_bytes, data=(figure or begin_figure(data))()))
    return [folder / TABLE, folder / FIGURE]


def write_overview(partitions: Sequence[tuple[str, Dataset]], folder: Path) -> Path:
    """Write `partitions.png`, the figures of several partitions of one data set in one, and return its path."""
    make_folders(folder)
    counts = [(kind, partition_counts(data)) for kind, data in partitions]
    disk().fill(folder / OVERVIEW, partial(Path.write_bytes, data=call(partition_figure.overview_png, counts)))
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
        clients, labels = data.owners, data.train.labels[data.order]
        rows.append(_summary("classes", classes_held(data)))
        for label in range(n_classes):
            counts = np.bincount(clients[labels == label], minlength=data.n_clients)
            rows.append(_summary(f"class_{label}", counts))
    return pa.Table.from_pylist(rows)


def partition_counts(data: Dataset) -> PartitionCounts:
    """Return what the figure of the data shows."""
    if has_classes(data):
        if data.n_clients <= MOST_ROWS and data.n_clients * data.n_classes <= MOST_CELLS:
            return PartitionCounts(data.name, data.examples, "classes", class_counts(data))
        return PartitionCounts(data.name, data.examples, "classes held", classes_held(data))
    if isinstance(data, Interactions):
        popularity = np.bincount(data.items, minlength=data.n_items)
        return PartitionCounts(data.name, data.examples, "items", popularity)
    if isinstance(data, Samples) and data.targets == "numbers":
        values = np.split(data.train.labels[data.order, 0], data.indptr[1:-1])
        if data.n_clients <= MOST_BARS:
            return PartitionCounts(data.name, data.examples, "numbers", values)
        means = np.array([float(each.mean()) for each in values if len(each)])
        return PartitionCounts(data.name, data.examples, "means", means)
    return PartitionCounts(data.name, data.examples, None, no_values())


def has_classes(data: Dataset) -> TypeGuard[Samples]:
    """Return whether the data has samples of classes; tokens and numbers are shown by the sizes of the clients."""
    return isinstance(data, Samples) and data.targets == "classes"


def class_counts(data: Samples) -> IntArray:
    """Return the number of samples of each class per client, [U, classes]."""
    cells = data.owners * data.n_classes + data.train.labels[data.order]
    return np.bincount(cells, minlength=data.n_clients * data.n_classes).reshape(data.n_clients, data.n_classes)


def classes_held(data: Samples) -> IntArray:
    """Return the number of different classes per client, [U], in memory proportional to the samples."""
    cells = np.unique(data.owners * data.n_classes + data.train.labels[data.order])
    return np.bincount(cells // data.n_classes, minlength=data.n_clients)


def _summary(measure: str, values: IntArray) -> dict[str, str | float | int]:
    quantiles = np.quantile(values, list(_QUANTILES.values())).tolist()
    return {
        "measure": measure,
        "clients_without": int((values == 0).sum()),
        "mean": float(values.mean()),
        **dict(zip(_QUANTILES, quantiles, strict=True)),
    }
