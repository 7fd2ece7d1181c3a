"""The exact minimiser of a separable convex error over a polymatroid, by decomposition.

Solve as if only the whole capacity mattered; where some set of users is then above its own, the most violated one is
tight in the solution, so that it and the rest (with what it takes seen as noise) are two smaller problems of the same
kind. Reference: Groenevelt, European Journal of Operational Research 54, 1991; Fujishige, Submodular Functions and
Optimization, section 8. Tested against general solvers in `test_allocation.py`.
"""

from __future__ import annotations

import numpy as np

from narrowcast.algorithms.channel.error_curves import Errors
from narrowcast.algorithms.channel.regions import TOLERANCE, Independent, Region, overloaded
from narrowcast.algorithms.channel.table_region import name_of
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import BoolArray, FloatArray

# Sets are held to this part of their capacity while dividing, well within `TOLERANCE` of the result.
_DIVISION = 1e-12


def least_error(errors: Errors, region: Region, seconds: float, lower: FloatArray | None = None) -> FloatArray:
    """The bits x [n] of least total error with x >= lower and x / seconds in the region.

    Everything the region can carry is given away, up to the last points of `Curves`. Cost: O(n log n) for each set that
    is found tight, at most 2 n - 1 times.

    Raises `UserError` where the seconds are not above 0, or the lower bounds, or the errors' own, are out of reach.
    """
    check_seconds(seconds)
    lower = np.zeros(len(region)) if lower is None else lower
    if len(errors) != len(region) or lower.shape != (len(region),):
        raise UserError(f"{len(region)} links, but errors of {len(errors)} users and {len(lower)} lower bounds")
    lower = np.maximum(errors.least(), lower)
    if (beyond := out_of_reach(region, seconds, lower)) is not None:
        raise UserError(beyond)
    bits = _divide(errors, region, seconds, lower)
    return np.minimum(bits, np.maximum(errors.most(), lower))


def _divide(errors: Errors, region: Region, seconds: float, lower: FloatArray) -> FloatArray:
    if isinstance(region, Independent):
        return np.maximum(region.rates * seconds, lower)
    bits = np.zeros(len(region))
    problems = [(np.arange(len(region)), region)]
    while problems:
        users, part = problems.pop()
        everyone = np.arange(len(users))
        total = seconds * part.rate(everyone)
        alone = len(users) == 1
        share = np.full(1, total) if alone else errors.take(users).split(total, lower[users])
        violated = overloaded(part, share / seconds, _DIVISION)
        if alone or not violated.any() or violated.all():
            bits[users] = np.maximum(share, lower[users])
        else:
            problems.append((users[violated], part.take(everyone[violated])))
            problems.append((users[~violated], part.after(everyone[violated])))
    return bits


def out_of_reach(region: Region, seconds: float, lower: FloatArray) -> str | None:
    """What is wrong with these lower bounds [n], in one line; None where the region can carry them all."""
    everyone = np.arange(len(region))
    if lower.shape != everyone.shape or not (np.isfinite(lower) & (lower >= 0)).all():
        return f"lower bounds must be {len(region)} finite numbers of bits, none negative; got {lower}"
    users = everyone[overloaded(region, lower / seconds)]
    if not len(users):
        return None
    named = f"users {name_of(users.tolist())}" if len(users) <= 10 else f"{len(users)} of the users"
    return (
        f"{named} need at least {lower[users].sum():.6g} bits and their links carry {seconds * region.rate(users):.6g} "
        f"in {seconds:g} s; lower the bounds, give more seconds or leave users out"
    )


def affordable(region: Region, seconds: float, lower: FloatArray) -> BoolArray:
    """Who takes part, [n]: users are let in as long as all can have their lower bounds, those who can do it best first.

    In the order of lower bound / what the user could send alone. With equal bounds and a Gaussian region no choice lets
    more users in. Users whose links carry nothing are left out.
    """
    everyone = np.arange(len(region))
    alone = seconds * region.alone()
    able = (alone > 0) & (lower <= alone * (1 + TOLERANCE))
    candidates = everyone[able]
    candidates = candidates[np.argsort(lower[candidates] / alone[candidates], kind="stable")]
    inside = np.zeros(len(region), dtype=bool)
    while len(candidates):
        # bounds that are too much stay so when users are added: bisect for the longest run that fits
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
        if region.ordered:  # nor does anybody fit who has less and needs more than the one that does not
            candidates = candidates[(alone[candidates] > alone[refused]) | (lower[candidates] < lower[refused])]
    return inside


def check_seconds(seconds: float) -> None:
    """Raise `UserError` unless there is time to send in."""
    if not (np.isfinite(seconds) and seconds > 0):
        raise UserError(f"seconds = {seconds}; an upload needs a finite time above 0")
