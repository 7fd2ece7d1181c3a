"""The work of a proof of a bound, counted from the pattern of its matrix before the proof is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from narrowcast.algorithms.local_training.compiled import compiled
from narrowcast.algorithms.sdp.certificate import LANCZOS_VECTORS, SYMMETRIC, Proof
from narrowcast.platform.types import IntArray

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_PRODUCTS, _FACTORISATIONS = 2500, 0.4
"""Of a proof, in the time of as many multiplications of a sweep: up to 11,000 and usually 1.5, four times as quick."""
_DENSE = 300
"""Sides up to which L is taken to be full: counting its entries is not worth a compilation."""


def proof_work(pattern: csr_array, proof: Proof) -> float:
    """Return about the work of a proof that no eigenvalue is below a number, in multiplications of a sweep.

    The pattern is that of the matrix, symmetric; its diagonal need not be in it. The multiplications of a factorisation
    are counted exactly, as the squares of the numbers of entries of the columns of L.
    """
    size = pattern.shape[0]
    lanczos = _PRODUCTS * float(pattern.nnz + 2 * LANCZOS_VECTORS * size)
    if proof == "lanczos":
        return lanczos
    if size <= _DENSE:
        return lanczos + _FACTORISATIONS * size**3 / 3
    columns = column_counts(pattern, elimination_order(pattern)).astype(np.float64)
    return lanczos + _FACTORISATIONS * float(columns @ columns)


def elimination_order(pattern: csr_array) -> IntArray:
    """Return the rows [n] in the order in which a factorisation eliminates them.

    It is that of an incomplete factorisation of some matrix of this pattern, which takes next to nothing without fill.
    """
    from scipy.sparse import csc_array, csr_array, eye_array
    from scipy.sparse.linalg import spilu

    ones = csr_array((np.ones(pattern.nnz), pattern.indices, pattern.indptr), shape=pattern.shape)
    dominant = csc_array(ones + eye_array(pattern.shape[0]) * (2.0 * np.diff(pattern.indptr).max(initial=0) + 2))
    return np.argsort(spilu(dominant, drop_tol=1.0, fill_factor=1.0, **SYMMETRIC).perm_c)


def column_counts(pattern: csr_array, order: IntArray) -> IntArray:
    """Return the number of entries in each column of L [n], its diagonal included, if rows are eliminated in an order.

    Source: Davis, Direct Methods for Sparse Linear Systems, 2006, sections 4.1 and 4.2.
    """
    counts: IntArray = _counted(pattern.indptr.astype(np.int64), pattern.indices.astype(np.int64), order)
    return counts


@compiled()
def _counted(indptr: Any, indices: Any, order: Any) -> Any:
    """Walk up the elimination tree from each entry of each row, to rows whose entry is counted already."""
    size = len(order)
    place, parent, ancestor = np.empty(size, np.int64), np.full(size, -1), np.full(size, -1)
    for k in range(size):
        place[order[k]] = k
    for k in range(size):
        for e in range(indptr[order[k]], indptr[order[k] + 1]):
            i = place[indices[e]]
            while i != -1 and i < k:
                following = ancestor[i]
                ancestor[i] = k
                if following == -1:
                    parent[i] = k
                i = following
    counts, seen = np.ones(size, np.int64), np.full(size, -1)
    for k in range(size):
        seen[k] = k
        for e in range(indptr[order[k]], indptr[order[k] + 1]):
            i = place[indices[e]]
            while i < k and seen[i] != k:
                counts[i] += 1
                seen[i] = k
                i = parent[i]
    return counts
