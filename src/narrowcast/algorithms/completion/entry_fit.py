"""Completion over a nuclear-norm ball as an objective over positive semidefinite matrices of bounded trace."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from narrowcast.algorithms.completion.completion_problem import Completion
from narrowcast.algorithms.completion.nuclear_ball import leading_pair
from narrowcast.algorithms.sdp.smooth_objective import Vertex, quadratic_step
from narrowcast.platform.types import FloatArray


@dataclass(frozen=True, eq=False)
class EntryFit:
    """Half the squared error on the observed entries of X in [[W1, X], [X', W2]] of trace at most 2 radius.

    Some W1 and W2 make that matrix positive semidefinite if and only if the nuclear norm of X is at most `radius`. The
    side is m + n; the image is P_Omega(X) [p].

    Source: Fazel, Hindi and Boyd, ACC 2001; Jaggi and Sulovsky, ICML 2010.
    """

    problem: Completion
    radius: float

    @property
    def side(self) -> int:
        """Rows and columns, m + n."""
        return self.problem.observed.rows + self.problem.observed.columns

    @property
    def scale(self) -> float:
        """The value of X = 0."""
        return self.problem.observed.norm**2 / 2

    def image(self, vectors: FloatArray) -> FloatArray:
        """Return the observed entries of the upper right block of V V' [p]."""
        return self.problem.observed.sampled(*self._halves(vectors))

    def value(self, image: FloatArray) -> float:
        """Return half the squared error."""
        return float(np.sum((image - self.problem.observed.values) ** 2)) / 2

    def gradient(self, image: FloatArray) -> FloatArray:
        """Return the errors [p]."""
        return image - self.problem.observed.values

    def vertex(self, gradient: FloatArray, random: np.random.Generator, tolerance: float, products: int) -> Vertex:
        """Return sqrt(radius) (u, v) of the leading singular pair of minus the gradient."""
        observed = self.problem.observed
        start = random.standard_normal(observed.columns)
        pair = leading_pair(observed, -gradient, start, tolerance, products)
        vector = math.sqrt(self.radius) * np.concatenate([pair.left, pair.right])
        return Vertex(vector, -self.radius * pair.norm)

    def exact_step(self, image: FloatArray, change: FloatArray) -> float:
        """Return the minimiser of a parabola."""
        return quadratic_step(float(self.gradient(image) @ change), float(change @ change))

    def dual(self, image: FloatArray) -> FloatArray:
        """Return nothing, as there are no constraints."""
        del image
        return np.zeros(0)

    def _halves(self, vectors: FloatArray) -> tuple[FloatArray, FloatArray]:
        rows = self.problem.observed.rows
        return np.ascontiguousarray(vectors[:rows]), np.ascontiguousarray(vectors[rows:])
