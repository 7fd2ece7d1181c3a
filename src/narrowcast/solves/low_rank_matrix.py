"""Matrices of low rank as factors: norms without loss of digits, and leading singular triples of sums with sparse ones.

A matrix of rank k is left right', left [m, k] and right [n, k]. Solvers of completion, of nuclear norms
and of semidefinite programs share what is here; it belongs to none of them.
"""

from __future__ import annotations

import numpy as np

from narrowcast.platform.seeds import generator
from narrowcast.platform.types import FloatArray
from narrowcast.solves.observed import ObservedMatrix

Triples = tuple[FloatArray, FloatArray, FloatArray]
"""Left vectors [m, k], singular values [k] descending, right vectors [n, k]."""
OVERSAMPLED = 6


def frobenius(left: FloatArray, right: FloatArray) -> float:
    """Return the Frobenius norm of left right'.

    The product of the two triangles of QR factorisations keeps the digits that a Gram matrix loses: a difference of
    stacked factors is measured down to about 1e-16 of their norm.
    """
    return float(np.linalg.norm(np.linalg.qr(left)[1] @ np.linalg.qr(right)[1].T))


def difference(left: FloatArray, right: FloatArray, other_left: FloatArray, other_right: FloatArray) -> float:
    """Return the Frobenius norm of left right' - other_left other_right'."""
    return frobenius(np.hstack([left, -other_left]), np.hstack([right, other_right]))


def truncated(left: FloatArray, right: FloatArray, rank: int) -> Triples:
    """Return the leading singular triples of left right'."""
    q, r = np.linalg.qr(left)
    p, t = np.linalg.qr(right)
    u, s, vt = np.linalg.svd(r @ t.T)
    return q @ u[:, :rank], s[:rank], p @ vt[:rank].T


def leading(
    observed: ObservedMatrix,
    values: FloatArray,
    rank: int,
    start: FloatArray,
    passes: int,
    low_rank: tuple[FloatArray, FloatArray] | None = None,
) -> Triples:
    """Return leading singular triples of D + left right' by subspace iteration from `start` [n, b], b >= rank.

    D has the values at the observed entries; `low_rank` is (left, right), or None. A pass multiplies by the matrix and
    by its transpose, 4 p b + 4 (m + n) k b operations.

    Reference: Halko, Martinsson and Tropp, SIAM Review 53(2), 2011, algorithm 4.4.
    """
    basis, triangle = start, np.empty((0, 0))
    left_basis = np.empty((observed.rows, 0))
    for _ in range(passes):
        left_basis = np.linalg.qr(_plus(observed.times(values, basis), low_rank, basis))[0]
        turned = (low_rank[1], low_rank[0]) if low_rank is not None else None
        image = _plus(observed.transposed_times(values, left_basis), turned, left_basis)
        basis, triangle = np.linalg.qr(image)
    u, s, vt = np.linalg.svd(triangle.T, full_matrices=False)
    return left_basis @ u[:, :rank], s[:rank], basis @ vt[:rank].T


def random_block(observed: ObservedMatrix, rank: int, seed: int, draw: int = 0) -> FloatArray:
    """Return a Gaussian start [n, b] for `leading`, with some columns more than the rank where there are so many."""
    width = min(rank + OVERSAMPLED, observed.rows, observed.columns)
    return generator(seed, "completion start", draw).standard_normal((observed.columns, width))


def _plus(product: FloatArray, low_rank: tuple[FloatArray, FloatArray] | None, block: FloatArray) -> FloatArray:
    return product if low_rank is None else product + low_rank[0] @ (low_rank[1].T @ block)
