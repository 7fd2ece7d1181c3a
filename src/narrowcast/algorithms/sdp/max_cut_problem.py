"""The semidefinite relaxation of MAXCUT: unit vectors for vertices, its bound, and cuts by rounding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from narrowcast.algorithms.sdp.certificate import Proof, is_bounded_below, least_eigenvalue_bound
from narrowcast.algorithms.sdp.proof_work import proof_work
from narrowcast.algorithms.sdp.rounding import Roundings, round_by_hyperplanes
from narrowcast.algorithms.sdp.semidefinite_program import SemidefiniteProgram, numerical_rank
from narrowcast.algorithms.sdp.symmetric_constraints import SymmetricConstraints
from narrowcast.algorithms.sdp.vector_kernels import weighted_sums
from narrowcast.algorithms.sdp.weighted_graph import WeightedGraph
from narrowcast.platform.solver_contracts import Work
from narrowcast.platform.types import Arrays, FloatArray

LOWER_IS_BETTER = ("gap", "bound", "rank")
"""Metrics of `MaxCut` of which the lower value is better."""
_UNIT = 1e-12
"""Error of a norm up to which a vector is one of unit norm."""


@dataclass(frozen=True, eq=False)
class MaxCut:
    """Maximise sum_edges w_ij (1 - <v_i, v_j>) / 2 over unit vectors; an answer is `vectors` [n, k].

    With scalars +1 and -1 for vectors this is the largest cut. With X = V V' it is the semidefinite program
    min <W, X> over X >= 0 with unit diagonal; values are in units of the cut.

    Source: Goemans and Williamson, Journal of the ACM 42(6), 1995.
    """

    name: str
    source: str
    graph: WeightedGraph
    roundings: int
    proof: Proof
    seed: int

    @property
    def digest(self) -> str:
        """The sha256 of the graph."""
        return self.graph.digest

    @property
    def sizes(self) -> Mapping[str, int]:
        """Vertices and edges."""
        return {"vertices": self.graph.vertices, "edges": self.graph.edges}

    @cached_property
    def program(self) -> SemidefiniteProgram:
        """The same relaxation for any solver, min <W, X> / 4, which is half of all weight less the cut."""
        from scipy.sparse import csr_array, eye_array

        graph, size = self.graph, self.graph.vertices
        cost = csr_array((graph.weights / 4, graph.indices, graph.indptr), shape=(size, size))
        every = np.arange(size)
        unit = SymmetricConstraints(size, every, every, csr_array(eye_array(size)))
        return SemidefiniteProgram(self.name, self.source, cost, unit, np.ones(size), float(size), self.proof)

    @cached_property
    def _proof_work(self) -> float:
        from scipy.sparse import csr_array

        graph, size = self.graph, self.graph.vertices
        return proof_work(csr_array((graph.weights, graph.indices, graph.indptr), shape=(size, size)), self.proof)

    def measurement_work(self, answer: Arrays) -> Work:
        """Return the work of a product with the weights, which every iteration takes, and of a measurement."""
        size, columns = answer["vectors"].shape
        product, proofs = self.graph.edges * 2 * columns, 2 if "dual" in answer else 1
        cuts = self.roundings * (2 * self.graph.edges + size * columns)
        return Work(product, proofs * self._proof_work + product + cuts + size * columns**2)

    def measure(self, answer: Arrays) -> Mapping[str, float]:
        """Return the metrics of vectors, scaled to unit norm where they are not; `dual` [n] is that of `program`.

        `relaxation`: their objective; `bound`: an upper bound on every cut and on the relaxation, from a feasible
        point of the dual, that of the vectors or the solver's; `gap`: (bound - relaxation) / (1 + |bound|). `rank`: the
        number of directions that the vectors span. With roundings `cut` and `mean_cut`: the best and the mean cut of
        random hyperplanes, and `ratio`: the best over the bound.
        """
        vectors, graph = unit_vectors(answer["vectors"]), self.graph
        sums = weighted_sums(graph.indptr, graph.indices, graph.weights, vectors)
        relaxation = self._objective(vectors, sums)
        bound = self.bound(np.asarray(np.linalg.norm(sums, axis=1)))
        if "dual" in answer:
            bound = min(bound, graph.total / 2 - self.program.bound(answer["dual"]))
        found = {
            "relaxation": relaxation,
            "bound": bound,
            "gap": (bound - relaxation) / (1 + abs(bound)),
            "rank": numerical_rank(vectors),
        }
        if self.roundings:
            cuts = self.rounded(vectors, self.roundings).cuts
            best = float(cuts.max())
            found |= {"cut": best, "mean_cut": float(cuts.mean()), "ratio": best / bound if bound else 1.0}
        return found

    def relaxation(self, vectors: FloatArray) -> float:
        """Return the objective of unit vectors [n, k], in units of the cut."""
        graph = self.graph
        return self._objective(vectors, weighted_sums(graph.indptr, graph.indices, graph.weights, vectors))

    def _objective(self, vectors: FloatArray, sums: FloatArray) -> float:
        """Return the objective of unit vectors, given W V."""
        return self.graph.total / 2 - float(np.einsum("ik,ik->", vectors, sums)) / 4

    def rounded(self, vectors: FloatArray, count: int, first: int = 0) -> Roundings:
        """Return the cuts of vectors [n, k] by `count` hyperplanes of this problem's seed, from number `first` on."""
        return round_by_hyperplanes(self.graph, unit_vectors(vectors), count, self.seed, first)

    def bound(self, dual: FloatArray) -> float:
        """Return the bound that y = `dual` [n] proves.

        Every feasible X has <W, X> >= -sum y + n min(0, least eigenvalue of W + diag(y)).
        """
        least = least_eigenvalue_bound(self.graph, dual, self.proof)
        return float(self.graph.total / 2 + (dual.sum() + self.graph.vertices * max(0.0, -least)) / 4)

    def proves(self, answer: Arrays, gap: float) -> bool:
        """Return whether one sparse factorisation proves that the gap of unit vectors is at most this, in (0, 1)."""
        vectors, graph = answer["vectors"], self.graph
        sums = weighted_sums(graph.indptr, graph.indices, graph.weights, vectors)
        relaxation = self._objective(vectors, sums)
        dual = np.asarray(np.linalg.norm(sums, axis=1))
        most = (relaxation + gap) / (1 - gap if relaxation + gap > 0 else 1 + gap)
        allowed = most - graph.total / 2 - float(dual.sum()) / 4
        return allowed > 0 and is_bounded_below(graph, dual, -4 * allowed / graph.vertices)


def unit_vectors(vectors: FloatArray) -> FloatArray:
    """Return vectors [n, k] scaled to unit norm, those that are already unchanged; zero becomes the first axis."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    if (np.abs(norms - 1) <= _UNIT).all():
        return vectors
    first = np.eye(1, vectors.shape[1])
    return np.asarray(np.where(norms == 0, first, vectors / np.where(norms == 0, 1.0, norms)))
