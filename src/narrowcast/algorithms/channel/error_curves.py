"""What a client's error costs, as a function of its bits x: convex, separable, and solvable under one sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.local_training.compiled import compiled, read_only
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import FloatArray, IntArray

_HIGHEST_LOG = 1000.0
"""Powers of two beyond this one are taken for it, for fear of infinity."""


class Errors(Protocol):
    """A sum of convex, decreasing functions, one of the bits of each of n users."""

    def __len__(self) -> int:
        """How many users."""
        ...

    def values(self, bits: FloatArray) -> FloatArray:
        """Each user's error at these bits, [n]; infinite where there are too few."""
        ...

    def least(self) -> FloatArray:
        """Bits below which, or up to which, a user's error is infinite, [n]."""
        ...

    def most(self) -> FloatArray:
        """Bits beyond which nothing is gained, [n]."""
        ...

    def split(self, total: float, lower: FloatArray) -> FloatArray:
        """The x >= `lower` [n] of least error with sum `total`, at least `lower`'s and `least`'s; [n]."""
        ...

    def take(self, users: IntArray) -> Self:
        """The errors of some of the users."""
        ...

    def weighted(self, weights: FloatArray) -> Self:
        """The same with each user's error times its weight [n]."""
        ...


@dataclass(frozen=True)
class Neighbourhoods:
    """Error neighbourhoods of quantised gradient descent: weight / (k^2 - pole) at k = 2^(x / d) levels.

    As a function of k^2, every term of eq. (9) of the report is a constant plus this, whether k is the uplink's or the
    downlink's; see `theory.py` for the two numbers.

    Shapes: weight [n] above 0; pole [n] not negative; dimension d, the coordinates that the bits are for. Raises
    `UserError` otherwise.
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
        """Levels k = 2^(x / d), [n]."""
        return np.exp2(np.minimum(bits / self.dimension, _HIGHEST_LOG))

    def values(self, bits: FloatArray) -> FloatArray:
        """The sum's terms, and infinity at or below the pole, [n]."""
        above = np.exp2(np.minimum(2 * bits / self.dimension, _HIGHEST_LOG)) - self.pole
        return np.where(above > 0, self.weight / np.where(above > 0, above, 1.0), np.inf)

    def least(self) -> FloatArray:
        """The bits of the pole, and not below one level, [n]."""
        return self.dimension / 2 * np.log2(np.maximum(self.pole, 1.0))

    def most(self) -> FloatArray:
        """None, [n]."""
        return np.full(len(self), np.inf)

    def split(self, total: float, lower: FloatArray) -> FloatArray:
        """Where all marginal errors are alike or a bound holds, by Newton's method; accurate to 1e-14 of the total."""
        nats = 2 * np.log(2) / self.dimension
        with np.errstate(divide="ignore"):
            log_pole = np.log(self.pole)
        floor = np.maximum(lower, self.least())
        log_weight, log_pole, log_floor = (
            read_only(each, np.float64) for each in (np.log(self.weight), log_pole, nats * floor)
        )
        logs = _equal_marginals(log_weight, log_pole, log_floor, float(nats * total))
        return np.maximum(logs / nats, floor)

    def take(self, users: IntArray) -> Neighbourhoods:
        """The errors of some of the users."""
        return Neighbourhoods(self.weight[users], self.pole[users], self.dimension)

    def weighted(self, weights: FloatArray) -> Neighbourhoods:
        """The same with each user's error times its weight [n]."""
        check_weights(weights, len(self))
        return Neighbourhoods(self.weight * weights, self.pole, self.dimension)


@dataclass(frozen=True)
class Shares:
    """Error share^2 / x, least where bits are in proportion to the shares as far as a region allows.

    On a polymatroid that x is the lexicographically optimal base (Fujishige, Mathematics of Operations Research 5(2),
    1980): max-min fair in x / share, and least for every symmetric convex sum of it.

    Shapes: share [n] above 0; raises `UserError` otherwise.
    """

    share: FloatArray

    def __post_init__(self) -> None:
        check_weights(self.share)

    def __len__(self) -> int:
        return len(self.share)

    def values(self, bits: FloatArray) -> FloatArray:
        """share^2 / x, [n]."""
        with np.errstate(divide="ignore"):
            return self.share**2 / bits

    def least(self) -> FloatArray:
        """None: 0, [n]."""
        return np.zeros(len(self))

    def most(self) -> FloatArray:
        """None, [n]."""
        return np.full(len(self), np.inf)

    def split(self, total: float, lower: FloatArray) -> FloatArray:
        """max(lower, t share), with the t that makes the sum."""
        return np.asarray(_fill(read_only(self.share, np.float64), read_only(lower, np.float64), float(total)))

    def take(self, users: IntArray) -> Shares:
        """The shares of some of the users."""
        return Shares(self.share[users])

    def weighted(self, weights: FloatArray) -> Shares:
        """The same with each share times its weight [n]."""
        check_weights(weights, len(self))
        return Shares(self.share * weights)


def check_weights(weights: FloatArray, n_users: int | None = None) -> None:
    """Raise `UserError` unless there is one finite weight above 0 for every user, and a user."""
    if not len(weights) or (n_users is not None and weights.shape != (n_users,)):
        raise UserError(
            f"got {len(weights)} weights for {n_users or 'no'} users; give one to each of at least one user"
        )
    if (bad := np.flatnonzero(~(np.isfinite(weights) & (weights > 0)))).size:
        raise UserError(f"user {bad[0]}: weight = {weights[bad[0]]}; it must be finite and above 0")


# The sums below are convex and increasing in s, and start at or above the total, so that Newton's steps come down to
# the root without ever passing it.


@compiled()
def _equal_marginals(
    log_weight: NDArray[Any], log_pole: NDArray[Any], lower: NDArray[Any], total: float
) -> NDArray[np.float64]:
    """The log q = 2 log k of each user, at least `lower`: q / (q - pole)^2 = 1 / (weight exp(s)), s making the sum."""
    y = np.empty(len(lower))
    s = (total - log_weight.sum()) / len(lower)
    for _ in range(500):
        over, slope = -total, 0.0
        for user in range(len(lower)):
            v = s + log_weight[user]
            y[user], rise = v, 1.0
            if v - log_pole[user] < 35.0:  # beyond that, the pole is lost in rounding
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
