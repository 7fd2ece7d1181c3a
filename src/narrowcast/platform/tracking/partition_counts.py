"""The counts of the clients' data that its table and its figure show: little, whatever the size of the data.

Apart from both, as the figure is drawn in a second process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard

import numpy as np

from narrowcast.platform.data.dataset import Dataset
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.types import FloatArray, IntArray

MOST_BARS = 50
"""Clients that have a bar, or a box, each."""
MOST_ROWS, MOST_CELLS = 1000, 100_000
"""Above either limit the table is a summary; a cell is a client's count of one class."""


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


def partition_counts(data: Dataset) -> PartitionCounts:
    """Return what the figure of the data shows."""
    if has_classes(data):
        if in_full(data):
            return PartitionCounts(data.name, data.examples, "classes", class_counts(data))
        return PartitionCounts(data.name, data.examples, "classes held", classes_held(data))
    if isinstance(data, Interactions):
        popularity = np.bincount(data.items, minlength=data.n_items)
        return PartitionCounts(data.name, data.examples, "items", popularity)
    if isinstance(data, Samples) and data.targets == "numbers":
        values = np.split(data.train.labels[data.order, 0], data.indptr[1:-1])
        if data.n_clients <= MOST_BARS:
            return PartitionCounts(data.name, data.examples, "numbers", values)
        means = np.array([float(value.mean()) for value in values if len(value)])
        return PartitionCounts(data.name, data.examples, "means", means)
    return PartitionCounts(data.name, data.examples, None, no_values())


def in_full(data: Dataset) -> bool:
    """Return whether each client's counts are listed, for they are few enough."""
    n_classes = data.n_classes if has_classes(data) else 0
    return data.n_clients <= MOST_ROWS and data.n_clients * n_classes <= MOST_CELLS


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
