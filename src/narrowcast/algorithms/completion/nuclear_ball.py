"""Completion under a bound on the nuclear norm: the best matrix of rank 1 for a gradient, and the gap of an answer."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from narrowcast.algorithms.completion.low_rank_matrix import truncated
from narrowcast.algorithms.completion.observed import ObservedMatrix
from narrowcast.algorithms.sdp.lanczos import leading_eigenpair
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import FloatArray

logger = logging.getLogger(__name__)

NEGLIGIBLE = 1e-6
"""Of the largest singular value, below which another one does not count in the rank of an answer."""
_TOLERANCE, _PRODUCTS = 1e-10, 300
"""Of Lanczos where an answer is measured."""


class SingularPair(NamedTuple):
    """The leading unit vectors u [m] and v [n] of a sparse matrix, and a number its spectral norm is not above."""

    left: FloatArray
    right: FloatArray
    norm: float


def leading_pair(
    observed: ObservedMatrix, values: FloatArray, start: FloatArray, tolerance: float, most: int
) -> SingularPair:
    """Return the leading singular pair of D, which has these values at the observed entries; start [n].

    Lanczos on D'D, at most `most` products with it. The norm is that of `Eigenpair.above`.
    """

    def product(x: FloatArray) -> FloatArray:
        return observed.transposed_times(values, observed.times(values, x[:, None]))[:, 0]

    found = leading_eigenpair(product, start, tolerance, most)
    image = observed.times(values, found.vector[:, None])[:, 0]
    length = float(np.linalg.norm(image))
    left = image / length if length else np.eye(1, len(image))[0]
    return SingularPair(left, found.vector, math.sqrt(max(found.above, 0.0)))


def radius_of(observed: ObservedMatrix, rank: int | None, radius: float | None) -> float:
    """Return the radius, or an estimate from the observed entries, of which a warning is logged.

    The estimate is sqrt(k) |P_Omega(M)| sqrt(m n / p), the largest nuclear norm of a matrix of rank k with the same
    mean square, where k is the rank, and 1 where that is not known.
    """
    if radius is not None:
        return radius
    found = math.sqrt((rank or 1) / observed.fraction) * observed.norm
    logger.warning("solver.radius is not set; %.6g is taken from the size of the observed entries: tune it", found)
    return found


def ball_metrics(observed: ObservedMatrix, left: FloatArray, right: FloatArray, radius: float) -> Mapping[str, float]:
    """Return objective, certified gap, nuclear norm and rank of an answer of a solver over the ball of this radius.

    `objective` f is half the sum of squared errors on the observed entries. `gap` is <grad f(X), X> plus the radius
    times the spectral norm of the gradient: f is convex, so f(X) less the gap is a lower bound on it over the ball.
    """
    residual = observed.residual(left, right)
    start = generator(0, "nuclear ball start").standard_normal(observed.columns)
    norm = leading_pair(observed, residual, start, _TOLERANCE, _PRODUCTS).norm
    spread = truncated(left, right, left.shape[1])[1]
    fitted = observed.values - residual
    return {
        "objective": float(residual @ residual) / 2,
        "gap": radius * norm - float(residual @ fitted),
        "nuclear_norm": float(spread.sum()),
        "rank": float(np.count_nonzero(spread > NEGLIGIBLE * spread[0])),
    }
