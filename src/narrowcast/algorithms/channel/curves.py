"""Errors that are given as tables of (bits, distortion)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from narrowcast.algorithms.channel.error_curves import check_weights
from narrowcast.algorithms.local_training.compiled import compiled, read_only
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import FloatArray, IntArray


@dataclass(frozen=True)
class Curves:
    """weight x D(x) for each user, D the lower convex hull of its points.

    Allocation works on the hull, where time is shared between two points; what can be sent is a point, hence `floor`
    and `rounding.py`.

    Shapes: bits and distortion [n, P], each row ascending in bits and descending in distortion; a row with fewer points
    repeats its last. slopes [n, P - 1], not positive and ascending, those of the hull at and after each point; weight
    [n]. Made by `of`.
    """

    bits: FloatArray
    distortion: FloatArray
    slopes: FloatArray
    weight: FloatArray

    @classmethod
    def of(cls, bits: FloatArray | IntArray, distortion: FloatArray, weight: FloatArray | None = None) -> Curves:
        """Read points [n, P] in any order, leaving out those that cost more than another and are no better.

        Raises `UserError` where a point is not finite or has a negative number of bits, or a weight is not above 0.
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

    def __len__(self) -> int:
        return len(self.bits)

    def values(self, bits: FloatArray) -> FloatArray:
        """The hull at these bits x weight, flat after the last point and infinite before the first, [n]."""
        hull = self.distortion[:, :1] + np.cumsum(self.slopes * np.diff(self.bits), axis=1)
        hull = np.concatenate([self.distortion[:, :1], hull], axis=1)
        rows = zip(bits, self.bits, hull, strict=True)
        return self.weight * np.array([np.interp(x, xs, ys, left=np.inf) for x, xs, ys in rows])

    def least(self) -> FloatArray:
        """The bits of the first points, [n]."""
        return self.bits[:, 0]

    def most(self) -> FloatArray:
        """The bits of the last points, beyond which nothing is gained, [n]."""
        return self.bits[:, -1]

    def split(self, total: float, lower: FloatArray) -> FloatArray:
        """The steepest pieces first, until the total is spent; what no curve has a use for is dealt out evenly."""
        start = np.maximum(lower, self.least())
        pieces = self.slopes * self.weight[:, None]
        order = np.argsort(pieces, axis=None, kind="stable")
        order = order[pieces.ravel()[order] < 0]
        points, start = read_only(self.bits, np.float64), read_only(start, np.float64)
        return np.asarray(_steepest_first(read_only(order, np.int64), points, start, float(total)))

    def floor(self, bits: FloatArray) -> IntArray:
        """The last point that is affordable with these bits, [n]; -1 where none is."""
        last = (np.diff(self.bits, axis=1) > 0).sum(axis=1)  # of its copies, the first
        return np.minimum((self.bits <= bits[:, None]).sum(axis=1) - 1, last)

    def ceiling(self, bits: FloatArray) -> IntArray:
        """The first point with at least these bits, [n]; P where the curve ends before."""
        return (self.bits < bits[:, None]).sum(axis=1)

    def point_bits(self, points: IntArray) -> FloatArray:
        """The bits of one point of each user, [n]; infinity for P, the point that is not there."""
        beyond = np.concatenate([self.bits, np.full((len(self), 1), np.inf)], axis=1)
        return beyond[np.arange(len(self)), points]

    def take(self, users: IntArray) -> Curves:
        """The curves of some of the users."""
        return Curves(self.bits[users], self.distortion[users], self.slopes[users], self.weight[users])

    def weighted(self, weights: FloatArray) -> Curves:
        """The same with each user's error times its weight [n]."""
        check_weights(weights, len(self))
        return Curves(self.bits, self.distortion, self.slopes, self.weight * weights)


@compiled()
def _keep_undominated(bits: FloatArray, distortion: FloatArray) -> None:
    """Move each row's undominated points to its front, in place, and repeat the last of them."""
    for user in range(len(bits)):
        kept = 0
        for point in range(1, bits.shape[1]):
            if distortion[user, point] < distortion[user, kept]:
                kept += 1
                bits[user, kept], distortion[user, kept] = bits[user, point], distortion[user, point]
        for point in range(kept + 1, bits.shape[1]):
            bits[user, point], distortion[user, point] = bits[user, kept], distortion[user, kept]


@compiled()
def _hull_slopes(bits: FloatArray, distortion: FloatArray) -> FloatArray:
    """The slope of the lower convex hull between neighbouring points, [n, P - 1], by Andrew's monotone chain."""
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
        room = bits[user, piece + 1] - max(bits[user, piece], start[user])
        if rest <= 0:
            break
        if room > 0:
            taken = min(room, rest)
            x[user] += taken
            rest -= taken
    if rest > 0:
        x += rest / len(x)
    return x
