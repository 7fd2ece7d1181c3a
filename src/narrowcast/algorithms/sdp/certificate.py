"""A lower bound on the least eigenvalue of a sparse symmetric matrix, as proofs of dual feasibility need."""

from __future__ import annotations

import math
from collections.abc import Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from narrowcast.algorithms.sdp.weighted_graph import WeightedGraph
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import FloatArray

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
