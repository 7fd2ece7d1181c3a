"""From bits that may be any number to what can be sent: whole levels, or the points of a curve.

Round the exact solution down, which stays in the region; then let users take one step up wherever that fits, and trade
one step of a user for a step of another, as long as the total error falls. The result cannot be improved by any such
step or trade; the continuous solution's error stands below it as a bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from narrowcast.algorithms.channel.curves import Curves
from narrowcast.algorithms.channel.decomposition import least_error
from narrowcast.algorithms.channel.error_curves import Neighbourhoods
from narrowcast.algorithms.channel.regions import TOLERANCE, Region, contains
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import FloatArray, IntArray

_WORTH_IT = 1e-9
"""Of the total error. Less is what `TOLERANCE` of a capacity is worth, and would be gained in endless tiny steps."""
_MOST_LEVELS = 2.0**53
"""Whole numbers that a float can hold; nobody's error depends on finer levels."""


def whole_levels(errors: Neighbourhoods, region: Region, seconds: float, lower: FloatArray | None = None) -> IntArray:
    """Whole numbers of levels k [n] with k >= 2^(lower / d), d log2 k bits each in the region, and little total error.

    Raises `UserError` where the lower bounds are out of reach, or not even the next whole levels above them fit.
    """
    exact = least_error(errors, region, seconds, lower)
    least = np.ceil(errors.levels(np.maximum(errors.least(), 0.0 if lower is None else lower)) * (1 - 1e-12))
    least = np.where(np.isfinite(errors.values(errors.dimension * np.log2(least))), least, least + 1)
    start = np.floor(np.minimum(errors.levels(exact) * (1 + 1e-12), _MOST_LEVELS))
    start = np.maximum(least, start).astype(np.int64)
    grid = _Levels(errors, least.astype(np.int64))
    if not contains(region, grid.bits(start) / seconds):
        start = grid.least.copy()
    if not contains(region, grid.bits(start) / seconds):
        raise UserError(f"the lowest whole levels, {start.tolist()}, need more than the links carry; give more seconds")
    return _exchange(grid, region, seconds, start)


def whole_points(curves: Curves, region: Region, seconds: float, lower: FloatArray | None = None) -> IntArray:
    """The point of its curve that each user sends, [n], for little total error.

    Raises `UserError` where the lower bounds are out of reach, or no points at or above them fit together.
    """
    exact = least_error(curves, region, seconds, lower)
    bounds = np.maximum(curves.least(), 0.0 if lower is None else lower)
    if (short := np.flatnonzero(bounds > curves.most())).size:
        user = short[0]
        raise UserError(
            f"user {user}: at least {bounds[user]:g} bits, but its curve ends at {curves.most()[user]:g} bits"
        )
    least = curves.ceiling(bounds)
    grid = _Points(curves, least)
    start = np.maximum(least, curves.floor(exact * (1 + 1e-12)))
    if not contains(region, grid.bits(start) / seconds):
        start = least
    if not contains(region, grid.bits(start) / seconds):
        raise UserError("the first points above the lower bounds need more than the links carry; give more seconds")
    return _exchange(grid, region, seconds, start)


class _Grid(Protocol):
    """What can be sent, numbered upwards for each user; all [n]."""

    @property
    def least(self) -> IntArray: ...

    def bits(self, steps: IntArray) -> FloatArray: ...

    def values(self, steps: IntArray) -> FloatArray: ...

    def up(self, steps: IntArray) -> IntArray:
        """The next step with more bits; the same where there is none."""
        ...


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


@dataclass(frozen=True)
class _Points:
    curves: Curves
    least: IntArray

    def bits(self, steps: IntArray) -> FloatArray:
        return self.curves.bits[np.arange(len(steps)), steps]

    def values(self, steps: IntArray) -> FloatArray:
        return self.curves.weight * self.curves.distortion[np.arange(len(steps)), steps]

    def up(self, steps: IntArray) -> IntArray:
        above = np.minimum(steps + 1, self.curves.bits.shape[1] - 1)
        return np.where(self.bits(above) > self.bits(steps), above, steps)


def _exchange(grid: _Grid, region: Region, seconds: float, start: IntArray) -> IntArray:
    """Steps up, then trades of one user's step for another's, best first, until none of them helps."""
    steps = start.copy()
    n_users = len(steps)
    while True:
        higher, lower = grid.up(steps), np.maximum(steps - 1, grid.least)
        bits, values = grid.bits(steps), grid.values(steps)
        # [up, down], where the last column is for nobody down; what the others of a user's tightest set give up makes
        # room for it there, though not yet in other sets
        gain = (values - grid.values(higher))[:, None] - np.append(grid.values(lower) - values, 0.0)
        room, limiting = region.room(bits * (1 - TOLERANCE) / seconds)
        freed = np.column_stack([limiting * (bits - grid.bits(lower)), np.zeros(n_users)])
        fits = ((grid.bits(higher) - bits)[:, None] - freed) * (1 - TOLERANCE) <= seconds * room[:, None]
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
