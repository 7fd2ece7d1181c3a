"""Weighted sum of the rows that the clients of a chunk send, added in client order by compiled loops."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from narrowcast.algorithms.local_training.compiled import compiled, read_only
from narrowcast.algorithms.local_training.logistic import Floats
from narrowcast.platform.types import BoolArray, FloatArray, IntArray


def sum_rows(
    n_rows: int,
    rows: IntArray,
    row_starts: IntArray,
    changes: NDArray[Any],
    weights: NDArray[Any],
    delivered: BoolArray,
    dtype: DTypeLike = np.float32,
) -> tuple[NDArray[Any], FloatArray]:
    """Return the weighted sum of the delivered clients' row changes [N, k] and the number of clients of each row [N].

    Shapes: rows [R], without repeats inside a client, whose rows are `row_starts[c]:row_starts[c + 1]`; changes [R, k];
    weights, delivered [C].
    """
    total = np.zeros((n_rows, changes.shape[1]), dtype=dtype)
    touched = np.zeros(n_rows, dtype=np.float64)
    _sum(
        read_only(rows, np.int64),
        read_only(row_starts, np.int64),
        read_only(changes, dtype),
        read_only(weights, dtype),
        read_only(delivered, np.bool_),
        total,
        touched,
    )
    return total, touched


@compiled()
def _sum(
    rows: IntArray,
    row_starts: IntArray,
    changes: Floats,
    weights: Floats,
    delivered: BoolArray,
    total: Floats,
    touched: FloatArray,
) -> None:
    for client in range(len(delivered)):
        if delivered[client]:
            start, stop = row_starts[client], row_starts[client + 1]
            add_rows(rows[start:stop], changes[start:stop], weights[client], total, touched)


@compiled(inline=True)
def add_rows(rows: IntArray, changes: Floats, weight: np.float32, total: Floats, touched: FloatArray) -> None:
    """Add one client's weighted changes [m, k] to the rows of `total` [N, k] and count the client in `touched` [N]."""
    for place in range(len(rows)):
        touched[rows[place]] += 1
        target, change = total[rows[place]], changes[place]
        for column in range(len(target)):
            target[column] += change[column] * weight
