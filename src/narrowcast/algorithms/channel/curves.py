"""Error as a function of bits: convex functions of each client's bits, which an allocation of the uplink minimises.

The error of a cohort is the sum of its clients' functions. Each class minimises it exactly under one sum constraint
(`split`), from which `allocation.least_error` solves for a whole rate region.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.compiled import compiled, read_only
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


@compiled()
def _fill(share: NDArray[Any], lower: NDArray[Any], total: float) -> NDArray[np.float64]:
    """Return max(lower, t share) with the t that gives the total, [n].

    The sum is convex and increasing in t, and starts at or above the total: Newton's method descends to the root.
    """
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


@dataclass(frozen=True)
class DistortionCurves:
    """The error weight x D(x) of each user, D the lower convex hull of its points.

    Allocation works on the hull, on which two points share time; a client can only send a point, see `floor` and
    `allocation.whole_points`.

    Shapes: bits and distortion [n, P], each row ascending in bits and descending in distortion; a row with fewer points
    repeats its last. slopes [n, P - 1], not positive and ascending, of the hull at and after each point; weight [n].
    Made by `of`.
    """

    bits: FloatArray
    distortion: FloatArray
    slopes: FloatArray
    weight: FloatArray

    @classmethod
    def of(
        cls, bits: FloatArray | IntArray, distortion: FloatArray, weight: FloatArray | None = None
    ) -> DistortionCurves:
        """Read points [n, P] in any order; a point that costs more than another and is no better is left out.

        Raise `UserError` for a point that is not finite or has negative bits, and for a weight that is not above 0.
        """
        bits, distortion = np.asarray(bits, dtype=np.float64), np.asarray(distortion, dtype=np.float64)
        if bits.ndim != 2 or bits.shape != distortion.shape or not bits.size:
            raise UserError(
                f"curves need as many bits as distortions, [users, points]; got {bits.shape} and {distortion.shape}"
            )
        if (bad := np.argwhere(~(np.isfinite(bits) & np.isfinite(distortion) & (bits >= 0)))).size:
            user, point = bad[0]
            raise UserError(
                f"user {user}, point {point}: ({bits[user, point]} bits, distortion {distortion[user, point]}); both "
                "must be finite, and the bits not negative"
            )
        weight = np.ones(len(bits)) if weight is None else weight
        check_weights(weight, len(bits))
        order = np.lexsort((distortion, bits))
        bits, distortion = (np.take_along_axis(values, order, axis=1) for values in (bits, distortion))
        _keep_undominated(bits, distortion)
        return cls(bits, distortion, _hull_slopes(bits, distortion), weight)

    @classmethod
    def single_point(cls, bits: FloatArray, weight: FloatArray) -> DistortionCurves:
        """Return curves of users that send these bits [n], rounded up, or nothing."""
        return cls.of(np.ceil(np.column_stack([bits, bits])), np.zeros((len(bits), 2)), weight)

    def __len__(self) -> int:
        return len(self.bits)

    def values(self, bits: FloatArray) -> FloatArray:
        """Return weight x hull at these bits, flat after the last point and infinite before the first, [n]."""
        hull = self.distortion[:, :1] + np.cumsum(self.slopes * np.diff(self.bits), axis=1)
        hull = np.concatenate([self.distortion[:, :1], hull], axis=1)
        rows = zip(bits, self.bits, hull, strict=True)
        return self.weight * np.array([np.interp(x, xs, ys, left=np.inf) for x, xs, ys in rows])

    def min_bits(self) -> FloatArray:
        """Return the bits of the first points, [n]."""
        return self.bits[:, 0]

    def max_bits(self) -> FloatArray:
        """Return the bits of the last points, after which the error is constant, [n]."""
        return self.bits[:, -1]

    def split(self, total: float, lower: FloatArray) -> FloatArray:
        """Spend the total on the steepest pieces first, [n]; bits that no curve needs are divided evenly."""
        start = np.maximum(lower, self.min_bits())
        pieces = self.slopes * self.weight[:, None]
        order = np.argsort(pieces, axis=None, kind="stable")
        order = order[pieces.ravel()[order] < 0]
        points, start = read_only(self.bits, np.float64), read_only(start, np.float64)
        return np.asarray(_steepest_first(read_only(order, np.int64), points, start, float(total)))

    def floor(self, bits: FloatArray) -> IntArray:
        """Return the last point that is affordable with these bits, [n]; -1 if none is."""
        last = (np.diff(self.bits, axis=1) > 0).sum(axis=1)  # the first of its copies
        return np.minimum((self.bits <= bits[:, None]).sum(axis=1) - 1, last)

    def ceiling(self, bits: FloatArray) -> IntArray:
        """Return the first point with at least these bits, [n]; P if the curve ends before."""
        return (self.bits < bits[:, None]).sum(axis=1)

    def point_bits(self, points: IntArray) -> FloatArray:
        """Return the bits of one point of each user, [n]; infinity for the missing point P."""
        beyond = np.concatenate([self.bits, np.full((len(self), 1), np.inf)], axis=1)
        return beyond[np.arange(len(self)), points]

    def take(self, users: IntArray) -> DistortionCurves:
        """Return the curves of some of the users."""
        return DistortionCurves(self.bits[users], self.distortion[users], self.slopes[users], self.weight[users])

    def weighted(self, weights: FloatArray) -> DistortionCurves:
        """Return the curves with each user's error times its weight [n]."""
        check_weights(weights, len(self))
        return DistortionCurves(self.bits, self.distortion, self.slopes, self.weight * weights)


@compiled()
def _keep_undominated(bits: FloatArray, distortion: FloatArray) -> None:
    """Move each row's undominated points to its front, in place, and repeat the last of them."""
    for user in range(len(bits)):
        last = 0
        for point in range(1, bits.shape[1]):
            if distortion[user, point] < distortion[user, last]:
                last += 1
                bits[user, last], distortion[user, last] = bits[user, point], distortion[user, point]
        for point in range(last + 1, bits.shape[1]):
            bits[user, point], distortion[user, point] = bits[user, last], distortion[user, last]


@compiled()
def _hull_slopes(bits: FloatArray, distortion: FloatArray) -> FloatArray:
    """Return the slope of the lower convex hull between neighbouring points, [n, P - 1], by Andrew's monotone chain."""
    n_users, n_points = bits.shape
    slopes = np.zeros((n_users, n_points - 1))
    corner = np.zeros(n_points, dtype=np.int64)
    for user in range(n_users):
        x, y = bits[user], distortion[user]
        top = 0
        corner[0] = 0
        for point in range(1, n_points):
            if x[point] == x[point - 1]:
                break
            while top > 0:
                a, b = corner[top - 1], corner[top]
                if (y[b] - y[a]) * (x[point] - x[b]) < (y[point] - y[b]) * (x[b] - x[a]):
                    break
                top -= 1
            top += 1
            corner[top] = point
        for edge in range(top):
            a, b = corner[edge], corner[edge + 1]
            for piece in range(a, b):
                slopes[user, piece] = (y[b] - y[a]) / (x[b] - x[a])
    return slopes


@compiled()
def _steepest_first(order: IntArray, bits: FloatArray, start: FloatArray, total: float) -> FloatArray:
    x = start.copy()
    rest = total - start.sum()
    for at in range(len(order)):
        user, piece = order[at] // (bits.shape[1] - 1), order[at] % (bits.shape[1] - 1)
        capacity = bits[user, piece + 1] - max(bits[user, piece], start[user])
        if rest <= 0:
            break
        if capacity > 0:
            taken = min(capacity, rest)
            x[user] += taken
            rest -= taken
    if rest > 0:
        x += rest / len(x)
    return x
