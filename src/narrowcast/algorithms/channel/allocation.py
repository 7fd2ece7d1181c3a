"""Uplink allocation: the bits of each client of a round, within the rate region and the round's upload time.

`least_error` solves the continuous problem exactly, `whole_points` and `exchange` round its solution to payloads that
can be sent, and the classes are the rules of an experiment. Every rule gives 0 bits to clients that cannot afford their
least payload, and divides the capacity among the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from narrowcast.algorithms.channel.curves import DistortionCurves, ErrorCurves, Shares, check_weights
from narrowcast.algorithms.channel.regions import TOLERANCE, Independent, Region, contains, name_of, overloaded
from narrowcast.platform.config.files import Section
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import BoolArray, FloatArray, IntArray

# Relative tolerance of a set's capacity while dividing, well within the `TOLERANCE` of the result.
_DIVISION = 1e-12


def least_error(errors: ErrorCurves, region: Region, seconds: float, lower: FloatArray | None = None) -> FloatArray:
    """Return the bits x [n] of least total error with x >= lower and x / seconds in the region.

    This is the exact minimiser of a separable convex error over a polymatroid, by decomposition: solve with the
    constraint of all users alone. If sets of users then exceed their own capacity, the most violated one is tight in
    the solution: it and the other users (given what it takes) are two smaller problems of the same kind.

    The whole capacity is allocated, up to the last points of `DistortionCurves`. Cost: O(n log n) for each tight set,
    at most 2 n - 1 of them.

    Raise `UserError` for seconds not above 0, and for lower bounds, or `errors.min_bits()`, outside the region.

    Reference: Groenevelt, European Journal of Operational Research 54, 1991; Fujishige, Submodular Functions and
    Optimization, section 8. Tested against general solvers.
    """
    check_seconds(seconds)
    lower = np.zeros(len(region)) if lower is None else lower
    if len(errors) != len(region) or lower.shape != (len(region),):
        raise UserError(f"{len(region)} links, but errors of {len(errors)} users and {len(lower)} lower bounds")
    lower = np.maximum(errors.min_bits(), lower)
    if (beyond := out_of_reach(region, seconds, lower)) is not None:
        raise UserError(beyond)
    bits = _divide(errors, region, seconds, lower)
    return np.minimum(bits, np.maximum(errors.max_bits(), lower))


def _divide(errors: ErrorCurves, region: Region, seconds: float, lower: FloatArray) -> FloatArray:
    if isinstance(region, Independent):
        return np.maximum(region.rates * seconds, lower)
    bits = np.zeros(len(region))
    problems = [(np.arange(len(region)), region)]
    while problems:
        users, part = problems.pop()
        everyone = np.arange(len(users))
        total = seconds * part.capacity_of(everyone)
        alone = len(users) == 1
        share = np.full(1, total) if alone else errors.take(users).split(total, lower[users])
        violated = overloaded(part, share / seconds, _DIVISION)
        if alone or not violated.any() or violated.all():
            bits[users] = np.maximum(share, lower[users])
        else:
            problems.append((users[violated], part.take(everyone[violated])))
            problems.append((users[~violated], part.contracted(everyone[violated])))
    return bits


def out_of_reach(region: Region, seconds: float, lower: FloatArray) -> str | None:
    """Return one line on why lower bounds [n] are infeasible; None if they are feasible."""
    everyone = np.arange(len(region))
    if lower.shape != everyone.shape or not (np.isfinite(lower) & (lower >= 0)).all():
        return f"lower bounds must be {len(region)} finite numbers of bits, none negative; got {lower}"
    users = everyone[overloaded(region, lower / seconds)]
    if not len(users):
        return None
    carried = seconds * region.capacity_of(users)
    named = f"users {name_of(users.tolist())}" if len(users) <= 10 else f"{len(users)} of the users"
    return (
        f"{named} need at least {lower[users].sum():.6g} bits and their links carry {carried:.6g} "
        f"in {seconds:g} s; lower the bounds, give more seconds or leave users out"
    )


def affordable(region: Region, seconds: float, lower: FloatArray) -> BoolArray:
    """Return the users that take part, as a mask [n]: admitted greedily while all can have their lower bounds.

    Users are tried in ascending order of lower bound / single-user capacity. With equal bounds and a Gaussian region no
    choice admits more users. Users whose links carry nothing are left out.
    """
    everyone = np.arange(len(region))
    alone = seconds * region.single_rates()
    able = (alone > 0) & (lower <= alone * (1 + TOLERANCE))
    candidates = everyone[able]
    candidates = candidates[np.argsort(lower[candidates] / alone[candidates], kind="stable")]
    inside = np.zeros(len(region), dtype=bool)
    while len(candidates):
        # an infeasible run stays so when users are added: bisect for the longest feasible one
        fits, too_many = 0, len(candidates) + 1
        middle = len(candidates)
        while too_many - fits > 1:
            users = np.concatenate([everyone[inside], candidates[:middle]])
            if overloaded(region.take(users), lower[users] / seconds).any():
                too_many = middle
            else:
                fits = middle
            middle = (fits + too_many) // 2
        inside[candidates[:fits]] = True
        refused, candidates = candidates[fits : fits + 1], candidates[fits + 1 :]
        if region.ordered:  # users with less capacity and larger bounds than the refused one do not fit either
            candidates = candidates[(alone[candidates] > alone[refused]) | (lower[candidates] < lower[refused])]
    return inside


def check_seconds(seconds: float) -> None:
    """Raise `UserError` unless the upload time is finite and above 0."""
    if not (np.isfinite(seconds) and seconds > 0):
        raise UserError(f"seconds = {seconds}; an upload needs a finite time above 0")


_WORTH_IT = 1e-9
"""Least gain, relative to the total error; smaller ones are worth `TOLERANCE` of a capacity and would never end."""


def whole_points(curves: DistortionCurves, region: Region, seconds: float, lower: FloatArray | None = None) -> IntArray:
    """Return the point of its curve that each user sends, [n], with small total error.

    The exact solution of `least_error` is rounded down, which stays in the region, and improved by `exchange`. The
    error of the continuous solution is a lower bound.

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
    """Return steps [n] from which no step up, and no exchange of a user's step for another's, lowers the total error.

    Users take one step up wherever that fits, and one user's step is exchanged for another's, the best one first.
    """
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
        for pair in np.argsort(-gain[worth], kind="stable"):
            changed = steps.copy()
            changed[ups[pair]] = higher[ups[pair]]
            if downs[pair] < n_users:
                changed[downs[pair]] = lower[downs[pair]]
            if contains(region, grid.bits(changed) / seconds):
                steps = changed
                break
        else:
            return steps


@dataclass(frozen=True)
class Demand:
    """The demand of a round's clients on the uplink, [C]; `least` are their lower bounds in bits."""

    region: Region
    seconds: float
    least: FloatArray
    weights: FloatArray | None
    errors: ErrorCurves | None

    def affordable(self, least: FloatArray) -> IntArray:
        """Return the clients that can have at least so many bits [C] each, as indices."""
        return np.flatnonzero(affordable(self.region, self.seconds, least))


class Allocation(Section):
    """Base of the rules that allocate the uplink: a rule has a `kind` of its own and `divided`."""

    kind: str

    def bits(
        self,
        region: Region,
        seconds: float,
        lower: IntArray,
        weights: FloatArray | None = None,
        errors: ErrorCurves | None = None,
    ) -> IntArray:
        """Return the bits that each client may send in `seconds`, [C]; 0 for a client that cannot afford `lower` [C].

        `weights` [C] scale the clients' errors or shares; `errors` gives a client's error as a function of its bits.
        Raise `UserError` for bounds that are not finite and non-negative, and for weights or seconds not above 0.
        """
        demand = Demand(region, seconds, _lower_bounds(lower, region, seconds), weights, errors)
        users, exact = self.divided(demand)
        bits = np.zeros(len(region), dtype=np.int64)
        # down, except for a whole number missed by float rounding alone
        bits[users] = np.floor(exact * (1 + TOLERANCE / 10))
        return bits

    def divided(self, demand: Demand) -> tuple[IntArray, FloatArray]:
        """Return the indices of the clients that take part, and the bits of each before they are rounded down."""
        raise NotImplementedError


class MinError(Allocation):
    """Minimise the weighted sum of the clients' errors exactly: eq. (9) of the wireless report, or distortion tables.

    With `DistortionCurves` each client gets the bits of one of its points, otherwise the exact solution in whole bits.
    """

    kind: Literal["min_error"] = "min_error"

    def divided(self, demand: Demand) -> tuple[IntArray, FloatArray]:
        """Return the bits of least error; raise `UserError` without `errors`."""
        errors, region = demand.errors, demand.region
        if errors is None:
            raise UserError("allocation.kind = min_error needs the clients' errors; use max_min, which needs none")
        if len(errors) != len(region):
            raise UserError(f"got the errors of {len(errors)} clients for {len(region)} links; give one for each")
        errors = errors if demand.weights is None else errors.weighted(demand.weights)
        least = np.maximum(demand.least, errors.min_bits())
        if isinstance(errors, DistortionCurves):  # a client that takes part sends a point, not a fraction of one
            least = errors.point_bits(errors.ceiling(least))
        users = demand.affordable(least)
        if not len(users):
            return users, np.zeros(0)
        errors, inside, least = errors.take(users), region.take(users), least[users]
        if isinstance(errors, DistortionCurves):
            points = whole_points(errors, inside, demand.seconds, least)
            return users, errors.bits[np.arange(len(users)), points]
        return users, least_error(errors, inside, demand.seconds, least)


class ByShare(Allocation):
    """Base of the rules that give bits in proportion to share x weight, as far as region and lower bounds allow."""

    def share(self, region: Region) -> FloatArray:
        """Return the share of each client, [C]."""
        raise NotImplementedError

    def divided(self, demand: Demand) -> tuple[IntArray, FloatArray]:
        """Return bits in proportion to the shares."""
        share = self.share(demand.region)
        if demand.weights is not None:
            check_weights(demand.weights, len(demand.region))
            share = share * demand.weights
        users = demand.affordable(demand.least)
        if not len(users):
            return users, np.zeros(0)
        shares, inside = Shares(share[users]), demand.region.take(users)
        return users, least_error(shares, inside, demand.seconds, demand.least[users])


class MaxMin(ByShare):
    """Max-min fair allocation of bits / weight."""

    kind: Literal["max_min"] = "max_min"

    def share(self, region: Region) -> FloatArray:
        """Return equal shares, [C]."""
        return np.ones(len(region))


class Proportional(ByShare):
    """Bits in proportion to each client's single-user rate (times its weight), as far as the region allows."""

    kind: Literal["proportional"] = "proportional"

    def share(self, region: Region) -> FloatArray:
        """Return the single-user rates, [C]."""
        return region.single_rates()


class Equal(Allocation):
    """The same bits for all: the most that every participating client can send."""

    kind: Literal["equal"] = "equal"

    def divided(self, demand: Demand) -> tuple[IntArray, FloatArray]:
        """Return the same bits for all that take part."""
        users = demand.affordable(demand.least)
        while len(users):
            # the smallest of max-min fair bits is feasible for all users at once
            fair = least_error(Shares(np.ones(len(users))), demand.region.take(users), demand.seconds).min()
            if demand.least[users].max() <= fair * (1 + TOLERANCE):
                return users, np.full(len(users), fair)
            users = np.delete(users, demand.least[users].argmax())
        return users, np.zeros(0)


def _lower_bounds(lower: IntArray, region: Region, seconds: float) -> FloatArray:
    check_seconds(seconds)
    lower = np.asarray(lower)
    if lower.shape != (len(region),) or not (np.isfinite(lower) & (lower >= 0)).all():
        raise UserError(f"lower bounds must be {len(region)} finite numbers of bits, none negative; got {lower}")
    return lower.astype(np.float64)
