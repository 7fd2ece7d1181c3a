"""The partition of the data over the clients as files: a table and a figure, small whatever the size of the data."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from narrowcast.platform.data.dataset import Dataset
from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.disk import disk, make_folders
from narrowcast.platform.tracking.partition_counts import (
    class_counts,
    classes_held,
    has_classes,
    in_full,
    partition_counts,
)
from narrowcast.platform.tracking.second_process import begin, call, partition_figure
from narrowcast.platform.types import IntArray

TABLE, FIGURE, OVERVIEW = "partition.parquet", "partition.png", "partitions.png"
FIGURES = "NARROWCAST_FIGURES"
"""The variable of the environment that says whether runs and solves draw their figures."""
_QUANTILES = {"min": 0.0, "p05": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}


def figures_asked() -> bool:
    """Return whether runs and solves draw figures; raise `UserError` unless `FIGURES` is absent, always or never."""
    if (asked := os.environ.get(FIGURES) or "always") not in ("always", "never"):
        raise UserError(f"{FIGURES} = {asked}: give always, or never for runs and solves without figures")
    return asked == "always"


def begin_figure(data: Dataset) -> Callable[[], bytes]:
    """Begin to draw the figure if there is a second process; return the function that returns it as a PNG file."""
    return begin(partition_figure.partition_png, partition_counts(data))


def write_partition(data: Dataset, folder: Path, figure: Callable[[], bytes] | None) -> list[Path]:
    """Write `partition.parquet` and `partition.png` into the folder, each below 200 kB, and return their paths.

    `figure` is what `begin_figure` returned; without it there is no figure.
    """
    make_folders(folder)
    disk().write_with(folder / TABLE, partial(pq.write_table, partition_table(data), compression="zstd"))
    if figure is None:
        return [folder / TABLE]
    disk().write_with(folder / FIGURE, partial(Path.write_bytes, data=figure()))
    return [folder / TABLE, folder / FIGURE]


def write_overview(partitions: Sequence[tuple[str, Dataset]], folder: Path) -> Path:
    """Write `partitions.png`, the figures of several partitions of one data set in one, and return its path."""
    make_folders(folder)
    counts = [(kind, partition_counts(data)) for kind, data in partitions]
    disk().write_with(folder / OVERVIEW, partial(Path.write_bytes, data=call(partition_figure.overview_png, counts)))
    return folder / OVERVIEW


def partition_table(data: Dataset) -> pa.Table:
    """Return one row per client with its examples and its count of each class; for many clients a summary.

    The summary has one row for the examples, one for the number of classes per client, and one for each class, with
    mean, quantiles and the number of clients without any.
    """
    if in_full(data):
        columns = {"client": np.arange(data.n_clients), "examples": data.examples}
        if has_classes(data):
            columns |= {f"class_{label}": counts for label, counts in enumerate(class_counts(data).T)}
        return pa.table({name: values.astype(np.int32) for name, values in columns.items()})
    rows = [_summary("examples", data.examples)]
    if has_classes(data):
        clients, labels = data.owners, data.train.labels[data.order]
        rows.append(_summary("classes", classes_held(data)))
        for label in range(data.n_classes):
            counts = np.bincount(clients[labels == label], minlength=data.n_clients)
            rows.append(_summary(f"class_{label}", counts))
    return pa.Table.from_pylist(rows)


def _summary(measure: str, values: IntArray) -> dict[str, str | float | int]:
    quantiles = np.quantile(values, list(_QUANTILES.values())).tolist()
    return {
        "measure": measure,
        "clients_without": int((values == 0).sum()),
        "mean": float(values.mean()),
        **dict(zip(_QUANTILES, quantiles, strict=True)),
    }
