"""A lower bound on the least eigenvalue of a sparse symmetric matrix, as proofs of dual feasibility need."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np

from narrowcast.algorithms.sdp.weighted_graph import WeightedGraph
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import FloatArray

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_DENSE = 64
"""Sides up to which the dense eigenvalues are computed; Lanczos needs fewer vectors than the matrix has rows."""
_LANCZOS_TOLERANCES = (1e-9, 1e-7, 1e-5)
"""Relative to the largest row sum; the next one is tried if Lanczos does not converge."""
_LANCZOS_VECTORS = 48
MOST_DENSE = 12_000
"""Sides up to which a dense factor is tried; it takes 8 n^2 bytes."""


def least_eigenvalue_bound(graph: WeightedGraph, diagonal: FloatArray, proof: Literal["lanczos", "cholesky"]) -> float:
    """Return a number that the least eigenvalue of W + diag(y) is not below.

    `lanczos`: the least Ritz value of a random start, less its residual and the rounding of a product. An
    eigenvalue is as near as that; a lower one would have to be orthogonal to the start, which has probability zero
    but is not excluded. `cholesky`: in addition a dense factorisation of the matrix less that number must succeed,
    which proves it in floating point (Rump, BIT 46, 2006, theorem 2.3).
    """
    from scipy.sparse import csr_array, diags_array

    size = graph.vertices
    weights = csr_array((graph.weights, graph.indices, graph.indptr), shape=(size, size))
    matrix = csr_array(weights + diags_array(diagonal))
    least = _ritz_bound(matrix)
    if proof == "lanczos":
        return least
    if size > MOST_DENSE:
        raise UserError(
            f"proof: cholesky takes a dense {size} x {size} matrix; up to {MOST_DENSE} are allowed, use lanczos"
        )
    dense = matrix.toarray()
    while True:
        shifted = dense - least * np.eye(size)
        rounding = (size + 2) * np.finfo(float).eps * float(np.trace(shifted))
        try:
            np.linalg.cholesky(shifted + rounding * np.eye(size))
        except np.linalg.LinAlgError:
            least -= max(rounding, 1e-12)
            continue
        return least - 2 * rounding


def _ritz_bound(matrix: csr_array) -> float:
    from scipy.sparse import diags_array
    from scipy.sparse.linalg import ArpackNoConvergence, eigsh

    size = matrix.shape[0]
    scale = float(abs(matrix).sum(axis=1).max())
    rounding = 4 * np.finfo(float).eps * scale * math.sqrt(size)
    if size <= _DENSE:
        return float(np.linalg.eigvalsh(matrix.toarray())[0]) - rounding
    # Errors are relative to the eigenvalue, and the least one of a solution is zero: that of scale I - A is not.
    mirrored = diags_array(np.full(size, scale)) - matrix
    start = generator(0, "lanczos start").standard_normal(size)
    for tolerance in _LANCZOS_TOLERANCES:
        try:
            _, vectors = eigsh(mirrored, k=1, which="LA", v0=start, tol=tolerance, ncv=_LANCZOS_VECTORS, maxiter=200)
            break
        except ArpackNoConvergence:
            continue
    else:  # Gershgorin's circles always hold
        return float((matrix.diagonal() + abs(matrix.diagonal()) - abs(matrix).sum(axis=1)).min())
    vector = vectors[:, 0] / np.linalg.norm(vectors[:, 0])
    least = float(vector @ (matrix @ vector))
    return least - float(np.linalg.norm(matrix @ vector - least * vector)) - rounding
