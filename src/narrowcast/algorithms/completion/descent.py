"""Exact steps along one factor, with the residual carried along."""

from __future__ import annotations

import numpy as np

from narrowcast.algorithms.completion.observed import ObservedMatrix
from narrowcast.platform.types import FloatArray

REFRESH = 50
"""Iterations between computations of the residual from the factors, which its updates drift from."""


def scaled(gradient: FloatArray, other: FloatArray) -> FloatArray:
    """Return gradient (other' other)^-1 [m, k], the Gram matrix raised by 1e-15 of its mean diagonal."""
    gram = other.T @ other
    size = np.trace(gram) / len(gram)
    gram[np.diag_indices_from(gram)] += 1e-15 * size
    try:
        return np.asarray(np.linalg.solve(gram, gradient.T).T, dtype=np.float64)
    except np.linalg.LinAlgError:
        return gradient / size if size else gradient


def left_step(
    observed: ObservedMatrix, left: FloatArray, right: FloatArray, residual: FloatArray, *, scale: bool
) -> tuple[FloatArray, FloatArray]:
    """Return left and residual after the exact step of least squares along the gradient of left, scaled or not."""
    gradient = observed.times(residual, right)
    direction = scaled(gradient, right) if scale else gradient
    return _stepped(left, residual, direction, gradient, observed.sampled(direction, right))


def right_step(
    observed: ObservedMatrix, left: FloatArray, right: FloatArray, residual: FloatArray, *, scale: bool
) -> tuple[FloatArray, FloatArray]:
    """Return right and residual after the exact step of least squares along the gradient of right, scaled or not."""
    gradient = observed.transposed_times(residual, left)
    direction = scaled(gradient, left) if scale else gradient
    return _stepped(right, residual, direction, gradient, observed.sampled(left, direction))


def _stepped(
    factor: FloatArray, residual: FloatArray, direction: FloatArray, gradient: FloatArray, change: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return a factor after the exact step, and the residual; `change` is that of the entries by `direction`."""
    curvature = float(change @ change)
    step = float(np.vdot(direction, gradient)) / curvature if curvature > 0 else 0.0
    return factor + step * direction, np.subtract(residual, step * change, out=residual)
