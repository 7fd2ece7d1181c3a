"""The objective of a Frank-Wolfe method over positive semidefinite matrices of bounded trace, as a contract."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from narrowcast.platform.types import FloatArray


class Vertex(NamedTuple):
    """A matrix z z' of the feasible set, z [n], and a number that <gradient, S> is not below for any S of the set."""

    vector: FloatArray
    least: float


class SmoothObjective(Protocol):
    """A convex differentiable f(A(X)) of a linear image A(X) [q], over X = V V' [n, n] of a bounded trace."""

    @property
    def side(self) -> int:
        """The side n of X."""
        ...

    @property
    def scale(self) -> float:
        """A positive number that gaps are divided by."""
        ...

    def image(self, vectors: FloatArray) -> FloatArray:
        """Return A(V V') [q]; vectors [n, k]."""
        ...

    def value(self, image: FloatArray) -> float:
        """Return f."""
        ...

    def gradient(self, image: FloatArray) -> FloatArray:
        """Return the gradient of f with respect to the image [q]."""
        ...

    def vertex(self, gradient: FloatArray, random: np.random.Generator, tolerance: float, products: int) -> Vertex:
        """Return the rank-one matrix of the set with about the least <A*(gradient), z z'>, by Lanczos."""
        ...

    def exact_step(self, image: FloatArray, change: FloatArray) -> float:
        """Return the step in [0, 1] with the least f(image + step change)."""
        ...

    def dual(self, image: FloatArray) -> FloatArray:
        """Return the point of the dual problem that the gradient is, empty if there are no constraints."""
        ...


def quadratic_step(slope: float, curvature: float) -> float:
    """Return the minimiser in [0, 1] of slope t + curvature t^2 / 2."""
    if curvature <= 0:
        return 1.0 if slope < 0 else 0.0
    return min(1.0, max(0.0, -slope / curvature))
