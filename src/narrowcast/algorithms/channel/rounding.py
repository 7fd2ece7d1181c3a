"""Rounding of a continuous allocation to feasible payloads, such as the points of a curve.

The exact solution is rounded down, which stays in the region. Then users take one step up wherever that fits, and one
user's step is exchanged for another's, as long as the total error falls. No such step or exchange improves the result;
the error of the continuous solution is a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from narrowcast.algorithms.channel.decomposition import least_error
from narrowcast.algorithms.channel.distortion_curves import DistortionCurves
from narrowcast.algorithms.channel.regions import TOLERANCE, Region, contains
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import FloatArray, IntArray

_WORTH_IT = 1e-9
"""Least gain, relative to the total error; smaller ones are worth `TOLERANCE` of a capacity and would never end."""


def whole_points(curves: DistortionCurves, region: Region, seconds: float, lower: FloatArray | None = None) -> IntArray:
    """Return the point of its curve that each user sends, [n], with small total error.

    Raise `UserError` if the lower bounds, or the first points at or above them, are infeasible.
    """
    exact = least_error(curves, region, seconds, lower)
    bounds = np.maximum(curves.min_bits(), 0.0 if lower is None else lower)
    if (short := np.flatnonzero(bounds > curves.max_bits())).size:
        user = short[0]
        raise UserError(
            f"user {user}: at least {bounds[user]:g} bits, but its curve ends at {curves.max_bits()[user]:g} bits"
        )
    least = curves.ceiling(bounds)
    grid = _Points(curves, least)
    start = np.maximum(least, curves.floor(exact * (1 + 1e-12)))
    if not contains(region, grid.bits(start) / seconds):
        start = least
    if not contains(region, grid.bits(start) / seconds):
        raise UserError("the first points above the lower bounds need more than the links carry; give more seconds")
    return exchange(grid, region, seconds, start)


class Grid(Protocol):
    """The payloads that can be sent, as steps in ascending order for each user; all [n]."""

    @property
    def least(self) -> IntArray:
        """The lowest steps that are allowed."""
        ...

    def bits(self, steps: IntArray) -> FloatArray:
        """Return the bits of these steps."""
        ...

    def values(self, steps: IntArray) -> FloatArray:
        """Return the errors that these steps leave."""
        ...

    def up(self, steps: IntArray) -> IntArray:
        """Return the next step with more bits; the same step if there is none."""
        ...


@dataclass(frozen=True)
class _Points:
    curves: DistortionCurves
    least: IntArray

    def bits(self, steps: IntArray) -> FloatArray:
        return self.curves.bits[np.arange(len(steps)), steps]

    def values(self, steps: IntArray) -> FloatArray:
        return self.curves.weight * self.curves.distortion[np.arange(len(steps)), steps]

    def up(self, steps: IntArray) -> IntArray:
        above = np.minimum(steps + 1, self.curves.bits.shape[1] - 1)
        return np.where(self.bits(above) > self.bits(steps), above, steps)


def exchange(grid: Grid, region: Region, seconds: float, start: IntArray) -> IntArray:
    """Take steps up, and exchanges of a user's step for another's, best first, until none improves; return [n]."""
    steps = start.copy()
    n_users = len(steps)
    while True:
        higher, lower = grid.up(steps), np.maximum(steps - 1, grid.least)
        bits, values = grid.bits(steps), grid.values(steps)
        # [up, down], the last column: no user down. Bits that others of a user's tightest set give up are available to
        # it in that set, though not yet in other sets.
        gain = (values - grid.values(higher))[:, None] - np.append(grid.values(lower) - values, 0.0)
        slack, limiting = region.slack(bits * (1 - TOLERANCE) / seconds)
        freed = np.column_stack([limiting * (bits - grid.bits(lower)), np.zeros(n_users)])
        fits = ((grid.bits(higher) - bits)[:, None] - freed) * (1 - TOLERANCE) <= seconds * slack[:, None]
        worth = fits & (gain > _WORTH_IT * np.abs(values).sum())
        worth[:, :n_users] &= (lower < steps) & ~np.eye(n_users, dtype=bool)
        ups, downs = np.nonzero(worth)
        for place in np.argsort(-gain[worth], kind="stable"):
            changed = steps.copy()
            changed[ups[place]] = higher[ups[place]]
            if downs[place] < n_users:
                changed[downs[place]] = lower[downs[place]]
            if contains(region, grid.bits(changed) / seconds):
                steps = changed
                break
        else:
            return steps
