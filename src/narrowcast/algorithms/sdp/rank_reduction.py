"""Reduction of an answer's rank to the bound of Barvinok and Pataki, with its constraints and objective kept."""

from __future__ import annotations

import numpy as np

from narrowcast.algorithms.sdp.semidefinite_program import SemidefiniteProgram
from narrowcast.platform.types import FloatArray

_NO_DIRECTION = 1e-9
"""Of the largest singular value, below which a direction of the vectors is left out; it is squared in X."""


def reduce_rank(program: SemidefiniteProgram, vectors: FloatArray) -> FloatArray:
    """Return vectors [n, r] with r (r + 1) / 2 <= m whose A(V V') is that of `vectors`, and <C, V V'> no larger.

    While r (r + 1) / 2 > m there is a symmetric D with <A_i, V D V'> = 0 for all i, and I + t D turns singular at some
    t without an eigenvalue below zero. While r (r + 1) / 2 > m + 1 D can keep the objective too. In the last step the
    sign of D is such that the objective does not rise; at an optimum it is the same for both signs.

    Source: Barvinok, Discrete and Computational Geometry 13, 1995; Pataki, Mathematics of Operations Research 23, 1998.
    """
    left, sizes, _ = np.linalg.svd(vectors, full_matrices=False)
    reduced = np.asarray((left * sizes)[:, sizes > _NO_DIRECTION * sizes[0]])
    count = program.constraints.count
    while (pairs := reduced.shape[1] * (reduced.shape[1] + 1) // 2) > count:
        upper = np.triu_indices(reduced.shape[1])
        rows = [_inner_products(program, reduced)[:, *upper], (reduced.T @ (program.cost @ reduced))[None, *upper]]
        equations = np.concatenate(rows if pairs > count + 1 else rows[:1]) * np.where(upper[0] == upper[1], 1.0, 2.0)
        scale = np.linalg.norm(equations, axis=1, keepdims=True)
        basis, _ = np.linalg.qr((equations / np.where(scale == 0, 1.0, scale)).T, mode="complete")
        kept = np.zeros((reduced.shape[1],) * 2)
        kept[upper] = basis[:, -1]
        kept = kept + np.triu(kept, 1).T
        slope = float(np.sum(kept * (reduced.T @ (program.cost @ reduced))))
        values, rotation = np.linalg.eigh(kept)
        largest = _denominator(values, slope if pairs == count + 1 else 0.0)
        shrunk = np.sqrt(np.maximum(0.0, 1 - values / largest))
        reduced = (reduced @ rotation) * shrunk
        reduced = np.delete(reduced, np.argmin(shrunk), axis=1)
    return reduced


def _denominator(values: FloatArray, slope: float) -> float:
    """Return the eigenvalue l with which I - D / l is singular and positive, the objective not rising by -slope / l."""
    least, most = float(values[0]), float(values[-1])
    if slope > 0 and most > 0:
        return most
    if slope < 0 and least < 0:
        return least
    return most if most >= -least else least


def _inner_products(program: SemidefiniteProgram, vectors: FloatArray) -> FloatArray:
    """Return V' A_i V of every constraint [m, r, r]."""
    constraints, rank = program.constraints, vectors.shape[1]
    products = vectors[constraints.rows][:, :, None] * vectors[constraints.columns][:, None, :]
    off = (constraints.rows != constraints.columns)[:, None, None]
    both = np.where(off, products + products.transpose(0, 2, 1), products)
    return np.asarray(constraints.values @ both.reshape(len(both), -1)).reshape(-1, rank, rank)
