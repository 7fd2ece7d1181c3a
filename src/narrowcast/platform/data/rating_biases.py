"""Biases of rows and columns: the part of a matrix of ratings that its means explain."""

from __future__ import annotations

import numpy as np

from narrowcast.platform.types import FloatArray, IntArray

_TOLERANCE, _ITERATIONS = 1e-10, 1000


def biases_of(
    row: IntArray, column: IntArray, values: FloatArray, shape: tuple[int, int], decay: float
) -> tuple[FloatArray, FloatArray]:
    """Return the biases a [m] and b [n] that minimise the sum of (v_ij - a_i - b_j)^2 + decay (|a|^2 + |b|^2).

    The normal equations are solved by conjugate gradients. Shapes: row, column, values [p].

    Source: Koren, Bell and Volinsky, Computer 42(8), 2009, equation 3, without the factors.
    """
    from scipy import sparse  # takes a while to import
    from scipy.sparse import linalg

    rows, columns = shape
    pattern = sparse.csr_array((np.ones(len(values)), (row, column)), shape=shape)
    in_row, in_column = (sparse.diags_array(pattern.sum(axis=axis) + decay) for axis in (1, 0))
    right = np.append(np.bincount(row, values, rows), np.bincount(column, values, columns))
    equations = sparse.block_array([[in_row, pattern], [pattern.T, in_column]], format="csr")
    found, _ = linalg.cg(equations, right, rtol=_TOLERANCE, maxiter=_ITERATIONS)
    return found[:rows], found[rows:]
