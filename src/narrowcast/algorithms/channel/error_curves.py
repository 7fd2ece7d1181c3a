"""Convex error functions of each client's bits x: separable, and minimised exactly under one sum constraint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.local_training.compiled import compiled, read_only
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import FloatArray, IntArray

_HIGHEST_LOG = 1000.0
"""Exponents of two are capped at this, which keeps powers finite."""


class ErrorCurves(Protocol):
    """A sum of convex, decreasing functions, one for the bits of each of n users."""

    def __len__(self) -> int:
        """Return the number of users."""
        ...

    def values(self, bits: FloatArray) -> FloatArray:
        """Return each user's error at these bits, [n]; infinite for too few bits."""
        ...

    def min_bits(self) -> FloatArray:
        """Return the bits below which, or up to which, a user's error is infinite, [n]."""
        ...

    def max_bits(self) -> FloatArray:
        """Return the bits after which a user's error is constant, [n]."""
        ...

    def split(self, total: float, lower: FloatArray) -> FloatArray:
        """Return the x >= `lower` [n] of least error with sum `total`, which the bounds leave feasible; [n]."""
        ...

    def take(self, users: IntArray) -> Self:
        """Return the errors of some of the users."""
        ...

    def weighted(self, weights: FloatArray) -> Self:
        """Return the errors times each user's weight [n]."""
        ...


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


@dataclass(frozen=True)
class Shares:
    """The error share^2 / x, minimised by bits in proportion to the shares as far as a region allows.

    On a polymatroid the minimiser is the lexicographically optimal base (Fujishige, Mathematics of Operations Research
    5(2), 1980): max-min fair in x / share, and least for every symmetric convex function of it.

    Shapes: share [n] above 0; other values raise `UserError`.
    """

    share: FloatArray

    def __post_init__(self) -> None:
        check_weights(self.share)

    def __len__(self) -> int:
        return len(self.share)

    def values(self, bits: FloatArray) -> FloatArray:
        """Return share^2 / x, [n]."""
        with np.errstate(divide="ignore"):
            return self.share**2 / bits

    def min_bits(self) -> FloatArray:
        """Return 0, [n]."""
        return np.zeros(len(self))

    def max_bits(self) -> FloatArray:
        """Return infinity, [n]: every bit lowers the error."""
        return np.full(len(self), np.inf)

    def split(self, total: float, lower: FloatArray) -> FloatArray:
        """Return max(lower, t share) with the t that gives the total, [n]."""
        return np.asarray(_fill(read_only(self.share, np.float64), read_only(lower, np.float64), float(total)))

    def take(self, users: IntArray) -> Shares:
        """Return the shares of some of the users."""
        return Shares(self.share[users])

    def weighted(self, weights: FloatArray) -> Shares:
        """Return the shares times each user's weight [n]."""
        check_weights(weights, len(self))
        return Shares(self.share * weights)


def check_weights(weights: FloatArray, n_users: int | None = None) -> None:
    """Raise `UserError` unless there is at least one user, and one finite weight above 0 for each."""
    if not len(weights) or (n_users is not None and weights.shape != (n_users,)):
        raise UserError(
            f"got {len(weights)} weights for {n_users or 'no'} users; give one to each of at least one user"
        )
    if (bad := np.flatnonzero(~(np.isfinite(weights) & (weights > 0)))).size:
        raise UserError(f"user {bad[0]}: weight = {weights[bad[0]]}; it must be finite and above 0")


# The sums below are convex and increasing, and start at or above the total: Newton's method descends to the root.


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


@compiled()
def _fill(share: NDArray[Any], lower: NDArray[Any], total: float) -> NDArray[np.float64]:
    x = np.empty(len(share))
    t = total / share.sum()
    for _ in range(len(share) + 1):
        over, slope = -total, 0.0
        for user in range(len(share)):
            x[user] = max(lower[user], t * share[user])
            over += x[user]
            slope += share[user] if t * share[user] > lower[user] else 0.0
        if over <= 1e-14 * total or slope <= 0:
            break
        t -= over / slope
    return x
