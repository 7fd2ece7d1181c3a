"""The linear rate of the Mixing method: the spectral radius of a sweep's derivative at the solution.

At a solution g_i = -y_i v_i. To first order a sweep is, on perturbations x_i of the vectors that are orthogonal to v_i,

    x_i <- (1 - w) x_i - (w / y_i) P_i sum_j w_ij x_j,    P_i = I - v_i v_i',  w = 1 / (1 - momentum),

vertex after vertex: overrelaxation of the Hessian P (W + diag(y)) P, and Gauss-Seidel without momentum. Rotations of
all vectors change nothing and are left out. In coordinates in which only the first r columns of the vectors are not
zero, the other columns are perturbed independently, by overrelaxation of W + diag(y) itself, whose kernel are these r
columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from narrowcast.algorithms.local_training.compiled import compiled
from narrowcast.algorithms.sdp.max_cut_problem import MaxCut
from narrowcast.algorithms.sdp.mixing import Mixing
from narrowcast.algorithms.sdp.vector_kernels import weighted_sums
from narrowcast.algorithms.sdp.weighted_graph import WeightedGraph
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import FloatArray

_RANK = 1e-4
"""Of the largest singular value, below which a direction of a converged solution counts as none."""
_TOLERANCE = 1e-5


@compiled(reorder=True)
def linearised_sweep(
    indptr: Any, indices: Any, weights: Any, vectors: Any, norms: Any, change: Any, relaxation: float
) -> None:
    """Replace a perturbation [n, c] by that after a sweep, in place; `vectors` [n, c], or zeros, `norms` y [n]."""
    sums = np.empty(change.shape[1])
    for i in range(change.shape[0]):
        sums[:] = 0.0
        for e in range(indptr[i], indptr[i + 1]):
            for c in range(change.shape[1]):
                sums[c] += weights[e] * change[indices[e], c]
        along = 0.0
        for c in range(change.shape[1]):
            along += sums[c] * vectors[i, c]
        for c in range(change.shape[1]):
            turned = sums[c] - along * vectors[i, c]
            change[i, c] = (1.0 - relaxation) * change[i, c] - relaxation * turned / norms[i]


@dataclass(frozen=True)
class LinearRate:
    """The spectral radius of a sweep within the columns that the solution uses, and in the others; its rank."""

    within: float
    across: float
    rank: int

    @property
    def rate(self) -> float:
        """The factor of the error by a sweep."""
        return max(self.within, self.across)


def linear_rate(problem: MaxCut, vectors: FloatArray, momentum: float) -> LinearRate:
    """Return the rate at a converged solution [n, k], by Arnoldi's method on the perturbations without rotations.

    It is that of the largest connected component: others rotate on their own, and an isolated vertex keeps its vector.
    """
    graph, vectors = _largest_component(problem.graph, vectors)
    _, spread, axes = np.linalg.svd(vectors, full_matrices=False)
    rank = int(np.count_nonzero(spread > _RANK * spread[0]))
    reduced = vectors @ axes[:rank].T
    reduced = np.ascontiguousarray(reduced / np.linalg.norm(reduced, axis=1, keepdims=True))
    norms = np.asarray(np.linalg.norm(weighted_sums(graph.indptr, graph.indices, graph.weights, reduced), axis=1))
    relaxation = 1 / (1 - momentum)
    across = [column[:, None] for column in reduced.T]
    rotations = []
    for first in range(rank):
        for second in range(first):
            turned = np.zeros_like(reduced)
            turned[:, first], turned[:, second] = reduced[:, second], -reduced[:, first]
            rotations.append(turned)
    within = _radius(graph, reduced, norms, relaxation, rotations) if rank > 1 else 0.0
    return LinearRate(within, _radius(graph, np.zeros((len(norms), 1)), norms, relaxation, across), rank)


def _largest_component(graph: WeightedGraph, vectors: FloatArray) -> tuple[WeightedGraph, FloatArray]:
    """Return the component with most vertices, and their vectors."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    weights = csr_array((graph.weights, graph.indices, graph.indptr), shape=(graph.vertices, graph.vertices))
    _, labels = connected_components(weights, directed=False)
    inside = np.flatnonzero(labels == np.bincount(labels).argmax())
    part = csr_array(weights[inside][:, inside])
    part.sort_indices()
    indptr, indices = part.indptr.astype(np.int64), part.indices.astype(np.int32)
    return WeightedGraph(indptr, indices, part.data), vectors[inside]


def _radius(
    graph: WeightedGraph, vectors: FloatArray, norms: FloatArray, relaxation: float, kernel: Sequence[FloatArray]
) -> float:
    """Return the spectral radius on perturbations [n, c] without the directions that a sweep keeps, `kernel`.

    A sweep is I - M^-1 H with the lower triangle M of the Hessian H, so that its projector onto the kernel N of H is
    N (N' M N)^-1 N' M.
    """
    from scipy.sparse import csr_array, triu
    from scipy.sparse.linalg import LinearOperator, eigs

    shape = vectors.shape
    weights = csr_array((graph.weights, graph.indices, graph.indptr), shape=(shape[0], shape[0]))
    upper = csr_array(triu(weights, 1))

    def tangent(change: FloatArray) -> FloatArray:
        turned: FloatArray = change - np.einsum("ic,ic->i", change, vectors)[:, None] * vectors
        return turned

    kept = np.array([each.ravel() for each in kernel])
    functionals = np.array(
        [(norms[:, None] / relaxation * each + tangent(np.asarray(upper @ each))).ravel() for each in kernel]
    )
    inner = np.linalg.pinv(functionals @ kept.T)

    def swept(flat: FloatArray) -> FloatArray:
        change = np.ascontiguousarray(tangent(np.real(flat).reshape(shape)))
        change -= (kept.T @ (inner @ (functionals @ change.ravel()))).reshape(shape)
        linearised_sweep(graph.indptr, graph.indices, graph.weights, vectors, norms, change, relaxation)
        return change.ravel()

    size = shape[0] * shape[1]
    start = swept(generator(0, "perturbation").standard_normal(size))
    operator = LinearOperator((size, size), matvec=swept, dtype=np.float64)
    found = eigs(operator, k=2, which="LM", v0=start, ncv=40, tol=_TOLERANCE, return_eigenvectors=False)
    return float(np.abs(found).max())


def observed_rate(solver: Mixing, problem: MaxCut, seed: int, most: int) -> tuple[float, FloatArray]:
    """Return the factor of the residual by a sweep at the end of a solve, and its vectors.

    The solve ends at a residual of 1e-11, or after `most` sweeps; the factor is the geometric mean over the last half
    of the digits gained since 1e-3.
    """
    state, residuals = solver.init(problem, seed), []
    for _ in range(most):
        state, report = solver.step(problem, state)
        residuals.append(report.residual)
        if report.residual <= 1e-11:
            break
    logs = np.log(np.array(residuals))
    middle = (np.log(1e-3) + logs[-1]) / 2
    begin = int(np.argmax(logs <= middle))
    last = len(logs) - 1
    return float(np.exp((logs[last] - logs[begin]) / max(1, last - begin))), state["vectors"]
