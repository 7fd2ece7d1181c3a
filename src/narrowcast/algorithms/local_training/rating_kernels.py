"""Steps of a partly observed matrix: compiled loops over entries, and matrix products for complete columns.

The compiled loops are over the observed entries of a chunk's clients. An entry x of row i and column j has the residual
w_i . h_j - x; the entries of a column are contiguous. Shapes: columns H [C, n, K], overwritten by steps.

`descend_columns` and `descend_rows` take the same steps on one client whose columns are observed in every row. Shapes:
X [n, N], the client's columns as rows; W [N, K]; H [n, K].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.compiled import compiled
from narrowcast.platform.models.factorisation import ConstraintSet
from narrowcast.platform.types import BoolArray, FloatArray, IntArray

Factors = NDArray[np.floating[Any]]


class ChunkEntries(NamedTuple):
    """W [N, K], the clients of a chunk [C], and the entries of all clients as in `ClientEntries`, in the type of W."""

    row_factors: Factors
    clients: IntArray
    starts: IntArray
    rows: IntArray
    columns: IntArray
    values: Factors
    row_starts: IntArray
    items: IntArray


@compiled()
def add_column_grams(
    entries: ChunkEntries,
    grams: FloatArray,
) -> None:
    """Add w_i w_i' over the observed rows of each column to `grams` [C, n, K, K]."""
    rank = entries.row_factors.shape[1]
    for index in range(len(entries.clients)):
        client = entries.clients[index]
        for entry in range(entries.starts[client], entries.starts[client + 1]):
            w = entries.row_factors[entries.items[entries.row_starts[client] + entries.rows[entry]]]
            gram = grams[index, entries.columns[entry]]
            for a in range(rank):
                for b in range(a + 1):
                    gram[a, b] += w[a] * w[b]


@compiled()
def step_columns(
    entries: ChunkEntries,
    rates: Factors,
    decay: float,
    crossing: float,
    columns: Factors,
) -> None:
    """Move each h_j by -rate (sum of residuals times w_i + decay h_j + crossing times the sum of its other values).

    Shapes: rates [C], those of the clients.
    """
    rank = entries.row_factors.shape[1]
    gradient = np.empty(rank, dtype=entries.row_factors.dtype)
    for index in range(len(entries.clients)):
        client, rate = entries.clients[index], rates[index]
        entry, stop = entries.starts[client], entries.starts[client + 1]
        while entry < stop:
            column = entries.columns[entry]
            h = columns[index, column]
            total = h.sum()
            for k in range(rank):
                gradient[k] = decay * h[k] + crossing * (total - h[k])
            while entry < stop and entries.columns[entry] == column:
                w = entries.row_factors[entries.items[entries.row_starts[client] + entries.rows[entry]]]
                residual = -entries.values[entry]
                for k in range(rank):
                    residual += w[k] * h[k]
                for k in range(rank):
                    gradient[k] += residual * w[k]
                entry += 1
            for k in range(rank):
                h[k] -= rate * gradient[k]


@compiled()
def measure_squares(
    entries: ChunkEntries,
    columns: Factors,
    loss: FloatArray,
    heaviest: FloatArray,
) -> None:
    """Write the mean squared residual of each client to `loss`, and the largest |h_j|^2 summed over a row's entries.

    Shapes: loss and heaviest [C].
    """
    rank = entries.row_factors.shape[1]
    for index in range(len(entries.clients)):
        client = entries.clients[index]
        weights = np.zeros(entries.row_starts[client + 1] - entries.row_starts[client])
        total = 0.0
        for entry in range(entries.starts[client], entries.starts[client + 1]):
            w = entries.row_factors[entries.items[entries.row_starts[client] + entries.rows[entry]]]
            h = columns[index, entries.columns[entry]]
            residual, square = -entries.values[entry], 0.0
            for k in range(rank):
                residual += w[k] * h[k]
                square += h[k] * h[k]
            total += residual * residual
            weights[entries.rows[entry]] += square
        heaviest[index] = weights.max() if len(weights) else 0.0
        loss[index] = total / max(entries.starts[client + 1] - entries.starts[client], 1)


@compiled()
def move_rows(
    entries: ChunkEntries,
    columns: Factors,
    moves: BoolArray,
    rates: Factors,
    decay: float,
    steps: int,
    change_starts: IntArray,
    changes: Factors,
) -> None:
    """Take gradient steps on each client's rows of W, and write their changes to `changes` [R, K].

    A step moves w_i by -rate (sum of residuals times h_j + decay w_i) with the rates [C] of the clients.
    """
    rank = entries.row_factors.shape[1]
    for index in range(len(entries.clients)):
        if not moves[index]:
            continue
        client, rate = entries.clients[index], rates[index]
        change = changes[change_starts[index] : change_starts[index + 1]]
        items = entries.items[entries.row_starts[client] : entries.row_starts[client + 1]]
        gradient = np.empty(change.shape, dtype=entries.row_factors.dtype)
        for _step in range(steps):
            for row in range(len(items)):
                for k in range(rank):
                    gradient[row, k] = decay * (entries.row_factors[items[row], k] + change[row, k])
            for entry in range(entries.starts[client], entries.starts[client + 1]):
                row, h = entries.rows[entry], columns[index, entries.columns[entry]]
                residual = -entries.values[entry]
                for k in range(rank):
                    residual += (entries.row_factors[items[row], k] + change[row, k]) * h[k]
                for k in range(rank):
                    gradient[row, k] += residual * h[k]
            for row in range(len(items)):
                for k in range(rank):
                    change[row, k] -= rate * gradient[row, k]


@compiled()
def descend_entry_by_entry(
    entries: ChunkEntries,
    rate: float,
    decay: float,
    columns: Factors,
    loss: FloatArray,
    moves: BoolArray,
    change_starts: IntArray,
    changes: Factors,
) -> None:
    """Step h_j at each entry in turn, with W fixed, and write the step of w_i at the new h_j to `changes` [R, K].

    h_j moves by -rate (2 residual w_i + 2 decay h_j). With its residual before that, w_i is to move by
    -rate (2 residual h_j + 2 decay w_i).
    """
    rank = entries.row_factors.shape[1]
    for index in range(len(entries.clients)):
        client, total = entries.clients[index], 0.0
        for entry in range(entries.starts[client], entries.starts[client + 1]):
            row = entries.rows[entry]
            w, h = (
                entries.row_factors[entries.items[entries.row_starts[client] + row]],
                columns[index, entries.columns[entry]],
            )
            residual = -entries.values[entry]
            for k in range(rank):
                residual += h[k] * w[k]
            total += residual * residual
            for k in range(rank):
                h[k] -= rate * (2 * residual * w[k] + 2 * decay * h[k])
            if moves[index]:
                change = changes[change_starts[index] + row]
                for k in range(rank):
                    change[k] -= rate * (2 * residual * h[k] + 2 * decay * w[k])
        loss[index] = total / max(entries.starts[client + 1] - entries.starts[client], 1)


def descend_columns(
    x: Factors,
    w: Factors,
    h: Factors,
    *,
    rate: float,
    decay: float,
    crossing: float,
    steps: int,
    h_set: ConstraintSet,
) -> Factors:
    """Return H after so many steps of -rate (residuals times W + decay H + crossing times the other values)."""
    rank = w.shape[1]
    gram = w.T @ w + np.eye(rank, dtype=w.dtype) * (decay - crossing) + w.dtype.type(crossing)
    products = x @ w
    for _ in range(steps):
        h = h_set.project(h - w.dtype.type(rate) * (h @ gram - products))
    return h


def descend_rows(x: Factors, w: Factors, h: Factors, *, rate: float, decay: float, steps: int) -> Factors:
    """Return the change of W by so many steps of -rate (residuals times H + decay W)."""
    gram, products = h.T @ h + np.eye(h.shape[1], dtype=h.dtype) * w.dtype.type(decay), x.T @ h
    moved = w
    for _ in range(steps):
        moved = moved - w.dtype.type(rate) * (moved @ gram - products)
    return np.asarray(moved - w)
