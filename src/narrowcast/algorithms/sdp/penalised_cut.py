"""The relaxation of MAXCUT with its unit diagonal as a penalty, over matrices of trace n."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from narrowcast.algorithms.sdp.lanczos import leading_eigenpair
from narrowcast.algorithms.sdp.max_cut_problem import MaxCut
from narrowcast.algorithms.sdp.smooth_objective import Vertex, quadratic_step
from narrowcast.algorithms.sdp.vector_kernels import weighted_sums
from narrowcast.platform.types import FloatArray

Penalty = Literal["quadratic", "soft_max"]
_HALVINGS = 60


@dataclass(frozen=True, eq=False)
class PenalisedCut:
    """<W, X> / 4 plus a penalty on the diagonal's errors e = diag(X) - 1, over X >= 0 of trace n.

    `quadratic`: weight |e|^2 / 2. `soft_max`: weight times (log sum_i (exp(M e_i) + exp(-M e_i)) - log(2 n)) / M, which
    is 0 at e = 0 and at most log(2 n) / M below the largest |e_i|; M is `sharpness`. The image is the diagonal and
    <W, X> / 4 [n + 1]. Half the weights less a lower bound on f bound the relaxation, whatever the weight.

    Source: Hazan, LATIN 2008, section 4, which has the soft maximum.
    """

    problem: MaxCut
    penalty: Penalty
    weight: float
    sharpness: float

    @property
    def side(self) -> int:
        """The vertices n."""
        return self.problem.graph.vertices

    @property
    def scale(self) -> float:
        """Half the sum of the absolute weights."""
        return float(np.abs(self.problem.graph.weights).sum()) / 4

    def image(self, vectors: FloatArray) -> FloatArray:
        """Return diagonal and objective [n + 1]."""
        return np.append(np.einsum("ik,ik->i", vectors, vectors), float(np.sum(vectors * self._times(vectors))) / 4)

    def value(self, image: FloatArray) -> float:
        """Return f."""
        error = image[:-1] - 1
        if self.penalty == "quadratic":
            return float(image[-1] + self.weight * (error @ error) / 2)
        both = self.sharpness * np.concatenate([error, -error])
        top = float(both.max())
        soft = top + math.log(np.exp(both - top).sum()) - math.log(len(both))
        return float(image[-1] + self.weight * soft / self.sharpness)

    def gradient(self, image: FloatArray) -> FloatArray:
        """Return what the diagonal and the objective are multiplied by [n + 1]."""
        error = image[:-1] - 1
        if self.penalty == "quadratic":
            return np.append(self.weight * error, 1.0)
        both = self.sharpness * np.concatenate([error, -error])
        shares = np.exp(both - both.max())
        shares /= shares.sum()
        return np.append(self.weight * (shares[: len(error)] - shares[len(error) :]), 1.0)

    def vertex(self, gradient: FloatArray, random: np.random.Generator, tolerance: float, products: int) -> Vertex:
        """Return sqrt(n) times the least eigenvector of W / 4 + diag(gradient)."""
        diagonal = gradient[:-1]

        def product(x: FloatArray) -> FloatArray:
            return -(self._times(x[:, None])[:, 0] / 4 + diagonal * x)

        pair = leading_eigenpair(product, random.standard_normal(self.side), tolerance, products)
        return Vertex(math.sqrt(self.side) * pair.vector, -self.side * pair.above)

    def exact_step(self, image: FloatArray, change: FloatArray) -> float:
        """Return the minimiser of a parabola, or of a convex function by bisection of its slope."""
        if self.penalty == "quadratic":
            curvature = self.weight * float(change[:-1] @ change[:-1])
            return quadratic_step(float(self.gradient(image) @ change), curvature)
        low, high = 0.0, 1.0
        if self.gradient(image + change) @ change <= 0:
            return 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self.gradient(image + middle * change) @ change < 0:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def dual(self, image: FloatArray) -> FloatArray:
        """Return a point y [n] of the dual of the problem's `program`, of slack W / 4 - diag(y)."""
        return -self.gradient(image)[:-1]

    def _times(self, vectors: FloatArray) -> FloatArray:
        graph = self.problem.graph
        found: FloatArray = weighted_sums(graph.indptr, graph.indices, graph.weights, np.ascontiguousarray(vectors))
        return found
