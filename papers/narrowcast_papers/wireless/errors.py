"""Eq. (9) of the wireless report as error curves: their exact minimisation, and its rounding to whole levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.channel.allocation import exchange, least_error
from narrowcast.algorithms.channel.curves import check_weights
from narrowcast.algorithms.channel.regions import Region, contains
from narrowcast.platform.compiled import compiled, read_only
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import FloatArray, IntArray

_HIGHEST_LOG = 1000.0
"""Exponents of two are capped at this, which keeps powers finite."""
_MOST_LEVELS = 2.0**53
"""Largest exact whole number of a float."""


@dataclass(frozen=True)
class Neighbourhoods:
    """Error neighbourhoods of quantised gradient descent: weight / (k^2 - pole) at k = 2^(x / d) levels.

    Every term of eq. (9) of the wireless report is a constant plus this, as a function of k^2, for the levels k of the
    uplink and of the downlink; `reproduce.wireless_theory` derives both numbers.

    Shapes: weight [n] above 0; pole [n] not negative; dimension d, the number of coordinates that share the bits.
    Other values raise `UserError`.
    """

    weight: FloatArray
    pole: FloatArray
    dimension: int

    def __post_init__(self) -> None:
        check_weights(self.weight)
        if self.pole.shape != self.weight.shape or not (np.isfinite(self.pole) & (self.pole >= 0)).all():
            raise UserError(f"poles must be {len(self.weight)} finite numbers, none below 0; got {self.pole}")
        if self.dimension < 1:
            raise UserError(f"dimension = {self.dimension}; a model has at least one coordinate")

    def __len__(self) -> int:
        return len(self.weight)

    def levels(self, bits: FloatArray) -> FloatArray:
        """Return the levels k = 2^(x / d), [n]."""
        return np.exp2(np.minimum(bits / self.dimension, _HIGHEST_LOG))

    def values(self, bits: FloatArray) -> FloatArray:
        """Return weight / (k^2 - pole), infinite at or below the pole, [n]."""
        above = np.exp2(np.minimum(2 * bits / self.dimension, _HIGHEST_LOG)) - self.pole
        return np.where(above > 0, self.weight / np.where(above > 0, above, 1.0), np.inf)

    def min_bits(self) -> FloatArray:
        """Return the bits of the pole, and at least those of one level, [n]."""
        return self.dimension / 2 * np.log2(np.maximum(self.pole, 1.0))

    def max_bits(self) -> FloatArray:
        """Return infinity, [n]: every bit lowers the error."""
        return np.full(len(self), np.inf)

    def split(self, total: float, lower: FloatArray) -> FloatArray:
        """Equalise marginal errors above the bounds by Newton's method, [n]; accurate to 1e-14 of the total."""
        nats = 2 * np.log(2) / self.dimension
        with np.errstate(divide="ignore"):
            log_pole = np.log(self.pole)
        floor = np.maximum(lower, self.min_bits())
        log_weight, log_pole, log_floor = (
            read_only(each, np.float64) for each in (np.log(self.weight), log_pole, nats * floor)
        )
        logs = _equal_marginals(log_weight, log_pole, log_floor, float(nats * total))
        return np.maximum(logs / nats, floor)

    def take(self, users: IntArray) -> Neighbourhoods:
        """Return the errors of some of the users."""
        return Neighbourhoods(self.weight[users], self.pole[users], self.dimension)

    def weighted(self, weights: FloatArray) -> Neighbourhoods:
        """Return the errors times each user's weight [n]."""
        check_weights(weights, len(self))
        return Neighbourhoods(self.weight * weights, self.pole, self.dimension)


def whole_levels(errors: Neighbourhoods, region: Region, seconds: float, lower: FloatArray | None = None) -> IntArray:
    """Return whole levels k >= 2^(lower / d), [n], with d log2 k bits each in the region, and small total error.

    Raise `UserError` if the lower bounds, or the next whole levels above them, are infeasible.
    """
    exact = least_error(errors, region, seconds, lower)
    least = np.ceil(errors.levels(np.maximum(errors.min_bits(), 0.0 if lower is None else lower)) * (1 - 1e-12))
    least = np.where(np.isfinite(errors.values(errors.dimension * np.log2(least))), least, least + 1)
    start = np.floor(np.minimum(errors.levels(exact) * (1 + 1e-12), _MOST_LEVELS))
    start = np.maximum(least, start).astype(np.int64)
    grid = _Levels(errors, least.astype(np.int64))
    if not contains(region, grid.bits(start) / seconds):
        start = grid.least.copy()
    if not contains(region, grid.bits(start) / seconds):
        raise UserError(f"the lowest whole levels, {start.tolist()}, need more than the links carry; give more seconds")
    return exchange(grid, region, seconds, start)


@dataclass(frozen=True)
class _Levels:
    errors: Neighbourhoods
    least: IntArray

    def bits(self, steps: IntArray) -> FloatArray:
        return self.errors.dimension * np.log2(steps)

    def values(self, steps: IntArray) -> FloatArray:
        return self.errors.values(self.bits(steps))

    def up(self, steps: IntArray) -> IntArray:
        return steps + 1


# The sum is convex and increasing, and starts at or above the total: Newton's method descends to the root.
@compiled()
def _equal_marginals(
    log_weight: NDArray[Any], log_pole: NDArray[Any], lower: NDArray[Any], total: float
) -> NDArray[np.float64]:
    """Return log q = 2 log k >= `lower` of each user, [n]: q / (q - pole)^2 = 1 / (weight exp(s)), s by the sum."""
    y = np.empty(len(lower))
    s = (total - log_weight.sum()) / len(lower)
    for _ in range(500):
        over, slope = -total, 0.0
        for user in range(len(lower)):
            v = s + log_weight[user]
            y[user], rise = v, 1.0
            if v - log_pole[user] < 35.0:  # otherwise the pole is below rounding
                r = np.exp(v - log_pole[user])
                above = r / 2 + np.sqrt(r + r * r / 4)  # q / pole - 1
                y[user], rise = log_pole[user] + np.log1p(above), above / (2 + above)
            if y[user] < lower[user]:
                y[user], rise = lower[user], 0.0
            over += y[user]
            slope += rise
        if over <= 1e-14 * abs(total) or slope <= 0:
            break
        s -= over / slope
    return y
