"""Convex error functions of each client's bits x: separable, and minimised exactly under one sum constraint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.local_training.compiled import compiled, read_only
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import FloatArray, IntArray


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


# The sum below is convex and increasing, and starts at or above the total: Newton's method descends to the root.


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
