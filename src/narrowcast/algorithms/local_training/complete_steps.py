"""The steps of `entry_steps` on clients whose columns are observed in every row, by products of matrices.

Shapes: X [n, N], the client's columns as rows; W row_factors [N, K]; H [n, K].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.models.constraint_sets import ConstraintSet

Factors = NDArray[np.floating[Any]]


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
