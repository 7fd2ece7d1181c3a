"""The exact minimiser of a separable convex error over a polymatroid, by decomposition.

Solve with the constraint of all users alone. If sets of users then exceed their own capacity, the most violated one is
tight in the solution: it and the others (given what it takes) are two smaller problems of the same kind.

Reference: Groenevelt, European Journal of Operational Research 54, 1991; Fujishige, Submodular Functions and
Optimization, section 8. Tested against general solvers in `test_allocation.py`.
"""

from __future__ import annotations

import numpy as np

from narrowcast.algorithms.channel.error_curves import ErrorCurves
from narrowcast.algorithms.channel.regions import TOLERANCE, Independent, Region, overloaded
from narrowcast.algorithms.channel.table_region import name_of
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import BoolArray, FloatArray

# Relative tolerance of a set's capacity while dividing, well within the `TOLERANCE` of the result.
_DIVISION = 1e-12


def least_error(errors: ErrorCurves, region: Region, seconds: float, lower: FloatArray | None = None) -> FloatArray:
    """Return the bits x [n] of least total error with x >= lower and x / seconds in the region.

    The whole capacity is allocated, up to the last points of `DistortionCurves`. Cost: O(n log n) for each tight set,
    at most 2 n - 1 of them.

    Raise `UserError` for seconds not above 0, and for lower bounds, or `errors.min_bits()`, outside the region.
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
