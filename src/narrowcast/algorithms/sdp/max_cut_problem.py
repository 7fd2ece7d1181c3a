"""The semidefinite relaxation of MAXCUT: unit vectors for vertices, its bound, and cuts by rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from narrowcast.algorithms.sdp.certificate import Proof, least_eigenvalue_bound
from narrowcast.algorithms.sdp.rounding import round_by_hyperplanes
from narrowcast.algorithms.sdp.vector_kernels import weighted_sums
from narrowcast.algorithms.sdp.weighted_graph import WeightedGraph
from narrowcast.platform.types import Arrays, FloatArray

LOWER_IS_BETTER = ("gap", "bound", "rank")
"""Metrics of `MaxCut` of which the lower value is better."""
_NEGLIGIBLE = 1e-6
"""Of the largest singular value, below which a direction of the vectors does not count in their rank."""


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

    @property
    def sufficient_rank(self) -> int:
        """The least k with k (k + 1) / 2 >= n: some solution has at most this rank (Barvinok 1995, Pataki 1998)."""
        return math.ceil((math.sqrt(8 * self.graph.vertices + 1) - 1) / 2)

    def measure(self, answer: Arrays) -> Mapping[str, float]:
        """Return the metrics of unit vectors.

        `relaxation`: their objective; `bound`: an upper bound on every cut and on the relaxation, from a feasible
        point of the dual; `gap`: (bound - relaxation) / |bound|. `rank`: the number of directions that the vectors
        span. With roundings `cut` and `mean_cut`: the best and the mean cut of random hyperplanes, and `ratio`: the
        best over the bound.
        """
        vectors, graph = answer["vectors"], self.graph
        sums = weighted_sums(graph.indptr, graph.indices, graph.weights, vectors)
        relaxation = graph.total / 2 - float(np.einsum("ik,ik->", vectors, sums)) / 4
        bound = self.bound(np.asarray(np.linalg.norm(sums, axis=1)))
        spread = np.linalg.svd(vectors, compute_uv=False)
        found = {
            "relaxation": relaxation,
            "bound": bound,
            "gap": (bound - relaxation) / max(abs(bound), np.finfo(float).tiny),
            "rank": float(np.count_nonzero(spread > _NEGLIGIBLE * spread[0])),
        }
        if self.roundings:
            cuts = round_by_hyperplanes(graph, vectors, self.roundings, self.seed).cuts
            best = float(cuts.max())
            found |= {"cut": best, "mean_cut": float(cuts.mean()), "ratio": best / bound}
        return found

    def bound(self, dual: FloatArray) -> float:
        """Return the bound that y = `dual` [n] proves.

        Every feasible X has <W, X> >= -sum y + n min(0, least eigenvalue of W + diag(y)).
        """
        least = least_eigenvalue_bound(self.graph, dual, self.proof)
        return float(self.graph.total / 2 + (dual.sum() + self.graph.vertices * max(0.0, -least)) / 4)
