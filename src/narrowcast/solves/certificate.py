"""A lower bound on the least eigenvalue of a sparse symmetric matrix, as proofs of dual feasibility need.

The work of a proof is counted from the pattern of its matrix before the proof is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from narrowcast.platform.compiled import compiled
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import FloatArray, IntArray
from narrowcast.solves.weighted_graph import WeightedGraph

if TYPE_CHECKING:
    from scipy.sparse import csr_array


Proof = Literal["lanczos", "factorisation"]
_DENSE = 64
"""Sides up to which the dense eigenvalues are computed; Lanczos needs fewer vectors than the matrix has rows."""
_LANCZOS_TOLERANCES = (1e-9, 1e-7, 1e-5)
"""Relative to the largest row sum; the next one is tried if Lanczos does not converge."""
LANCZOS_VECTORS = 48
SYMMETRIC: Mapping[str, Any] = {
    "permc_spec": "MMD_AT_PLUS_A",
    "diag_pivot_thresh": 0.0,
    "options": {"SymmetricMode": True},
}
"""Of SuperLU, so that rows and columns are eliminated in one order and pivots are those of L D L'."""
_LEAST_MARGIN = 1e-11
"""Relative to the largest row sum, the first margin that a factorisation is tried with."""


def least_eigenvalue_bound(graph: WeightedGraph, diagonal: FloatArray, proof: Proof) -> float:
    """Return a number that the least eigenvalue of W + diag(y) is not below, for the weights W of a graph."""
    return sparse_eigenvalue_bound(_slack_matrix(graph, diagonal), proof)


def sparse_eigenvalue_bound(matrix: csr_array, proof: Proof) -> float:
    """Return a number that the least eigenvalue of a symmetric matrix is not below.

    `lanczos`: the least Ritz value of a random start, less its residual and the rounding of a product. An
    eigenvalue is as near as that; a lower one would have to be orthogonal to the start, which has probability zero
    but is not excluded. `factorisation`: the Ritz value less the smallest margin tried with which a sparse L D L' has
    positive pivots only, which proves it up to the rounding of the factors (Sylvester's law of inertia; the bound of
    Rump, BIT 46, 2006, theorem 2.3, is subtracted). It is nearer, and its fill-in may be as large as the square of n.
    """
    from scipy.sparse import diags_array

    size = matrix.shape[0]
    scale = float(abs(matrix).sum(axis=1).max())
    ritz, residual = _least_ritz_value(matrix, scale)
    if proof == "lanczos":
        return ritz - residual - 4 * float(np.finfo(float).eps) * scale * math.sqrt(size)
    margin = max(scale, np.finfo(float).tiny) * _LEAST_MARGIN
    while True:
        shifted = matrix - diags_array(np.full(size, ritz - margin))
        if _has_positive_pivots(shifted):
            return ritz - margin - _rounding(shifted)
        margin *= 4


def gershgorin_bound(matrix: csr_array) -> float:
    """Return a number that the least eigenvalue of a symmetric matrix is not below, from its rows alone."""
    return float((matrix.diagonal() + abs(matrix.diagonal()) - abs(matrix).sum(axis=1)).min())


def least_eigenvector(matrix: csr_array) -> tuple[float, FloatArray]:
    """Return the least Ritz value of a symmetric matrix and its vector of unit norm; 0 and zero without convergence."""
    return _least_ritz_pair(matrix, float(abs(matrix).sum(axis=1).max()))[:2]


def is_bounded_below(graph: WeightedGraph, diagonal: FloatArray, least: float) -> bool:
    """Return whether one sparse factorisation proves that no eigenvalue of W + diag(y) is below `least`.

    It is the proof `factorisation` of `least_eigenvalue_bound` without the search for the eigenvalue.
    """
    from scipy.sparse import diags_array

    shifted = _slack_matrix(graph, diagonal) - diags_array(np.full(graph.vertices, least))
    return _has_positive_pivots(shifted - diags_array(np.full(graph.vertices, _rounding(shifted))))


def _slack_matrix(graph: WeightedGraph, diagonal: FloatArray) -> csr_array:
    """Return W + diag(y)."""
    from scipy.sparse import csr_array, diags_array

    weights = csr_array((graph.weights, graph.indices, graph.indptr), shape=(graph.vertices, graph.vertices))
    return csr_array(weights + diags_array(diagonal))


def _rounding(shifted: csr_array) -> float:
    """Return the bound of Rump on what rounding in the factorisation of a positive definite matrix can hide."""
    size = shifted.shape[0]
    return (size + 2) * float(np.finfo(float).eps) * float(abs(shifted.diagonal()).sum())


def _has_positive_pivots(matrix: csr_array) -> bool:
    from scipy.sparse import csc_array
    from scipy.sparse.linalg import splu

    try:
        factors = splu(csc_array(matrix), **SYMMETRIC)
    except RuntimeError:  # exactly singular
        return False
    return bool((factors.perm_r == factors.perm_c).all() and (factors.U.diagonal() > 0).all())


def _least_ritz_value(matrix: csr_array, scale: float) -> tuple[float, float]:
    """Return the least Ritz value and its residual; without convergence the bound of Gershgorin's circles, and 0."""
    least, vector, residual = _least_ritz_pair(matrix, scale)
    if not vector.any():
        return gershgorin_bound(matrix), 0.0
    return least, residual


def _least_ritz_pair(matrix: csr_array, scale: float) -> tuple[float, FloatArray, float]:
    """Return the least Ritz value, its vector and its residual; zeros without convergence."""
    from scipy.sparse import diags_array
    from scipy.sparse.linalg import ArpackNoConvergence, eigsh

    size = matrix.shape[0]
    if size <= _DENSE:
        values, vectors = np.linalg.eigh(matrix.toarray())
        return float(values[0]), vectors[:, 0], 0.0
    diagonal = matrix.diagonal()
    if np.count_nonzero(diagonal) == matrix.count_nonzero():  # a multiple of the identity leaves Lanczos nothing
        vector = np.zeros(size)
        vector[np.argmin(diagonal)] = 1.0
        return float(diagonal.min()), vector, 0.0
    # Errors are relative to the eigenvalue, and the least one of a solution is zero: that of scale I - A is not.
    mirrored = diags_array(np.full(size, scale)) - matrix
    draws = generator(0, "lanczos start")
    start = draws.standard_normal(size)
    options: dict[str, Any] = {"ncv": LANCZOS_VECTORS, "maxiter": 200}
    if "rng" in signature(eigsh).parameters:  # SciPy 1.17 draws new directions, where Lanczos ends early, from this
        options["rng"] = draws
    for tolerance in _LANCZOS_TOLERANCES:
        try:
            _, vectors = eigsh(mirrored, k=1, which="LA", v0=start, tol=tolerance, **options)
            break
        except ArpackNoConvergence:
            continue
    else:
        return 0.0, np.zeros(size), 0.0
    vector = vectors[:, 0] / np.linalg.norm(vectors[:, 0])
    least = float(vector @ (matrix @ vector))
    return least, vector, float(np.linalg.norm(matrix @ vector - least * vector))


_PRODUCTS, _FACTORISATIONS = 2500, 0.4
"""Of a proof, in the time of as many multiplications of a sweep: up to 11,000 and usually 1.5, four times as quick."""
_DENSE_PROOF = 300
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
    if size <= _DENSE_PROOF:
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
    position, parent, ancestor = np.empty(size, np.int64), np.full(size, -1), np.full(size, -1)
    for k in range(size):
        position[order[k]] = k
    for k in range(size):
        for e in range(indptr[order[k]], indptr[order[k] + 1]):
            i = position[indices[e]]
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
            i = position[indices[e]]
            while i < k and seen[i] != k:
                counts[i] += 1
                seen[i] = k
                i = parent[i]
    return counts
