"""Eq. (9) as error curves: minimised as by a general solver, and as well in whole levels as by enumeration."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from narrowcast.algorithms.channel.allocation import MinError, least_error
from narrowcast.algorithms.channel.regions import GaussianRegion, Region, TableRegion
from narrowcast.platform.errors import UserError
from narrowcast_papers.wireless.errors import Neighbourhoods, whole_levels
from regions_by_hand import (
    Array,
    base_inside,
    capacity,
    gaussian,
    relative_excess,
    solved_by_slsqp,
    subsets,
    table,
)


def a_problem(seed: int) -> tuple[Neighbourhoods, Region, float, Array, Array]:
    """Return errors, region, seconds, feasible lower bounds, and an interior point as a solver's start."""
    random = np.random.default_rng(seed)
    n_users = 2 + seed % 7
    region = gaussian(random, n_users, 2.0) if seed % 3 else table(random, n_users)
    inside = base_inside(region, random)
    seconds, dimension = float(random.uniform(0.5, 2.0)), int(random.integers(1, 4))
    # levels of the order of 2^1 to 2^8 keep the general solver's numbers in range
    seconds *= dimension * random.uniform(2, 6) / inside.mean()
    start = seconds * inside
    pole = np.where(random.random(n_users) < 0.6, 4 ** (random.uniform(0, 0.7, n_users) * start / dimension), 0.0)
    lower = np.where(random.random(n_users) < 0.4, random.uniform(0, 0.9, n_users) * start, 0.0)
    errors = Neighbourhoods(10 ** random.uniform(-1, 1, n_users), pole, dimension)
    return errors, region, seconds, lower, start


@pytest.mark.parametrize("seed", range(200))
def test_least_error_is_that_of_a_general_solver(seed: int) -> None:
    errors, region, seconds, lower, start = a_problem(seed)
    bits = least_error(errors, region, seconds, lower)
    assert (bits >= lower - 1e-9).all()
    assert relative_excess(region, bits / seconds) <= 1e-9
    nats = 2 * np.log(2) / errors.dimension

    def objective(x: Array, scale: float) -> tuple[float, Array]:
        q = np.exp(nats * x)
        above = np.maximum(q - errors.pole, 1e-300)
        return float((errors.weight / above).sum() / scale), -errors.weight * nats * q / above**2 / scale

    least = np.maximum(lower, errors.min_bits())
    solved, scale, outside = solved_by_slsqp(objective, region, seconds, least, start)
    ours = errors.values(bits).sum() / scale
    assert ours <= solved.fun * (1 + 1e-6) + outside * np.abs(solved.jac).max() * len(region)
    assert ours >= solved.fun * (1 - 1e-6)


@pytest.mark.parametrize("seed", range(40))
def test_whole_levels_are_as_good_as_the_best(seed: int) -> None:
    random = np.random.default_rng(seed)
    n_users, d = 2 + seed % 2, 10
    solo = random.integers(3, 13, n_users).astype(float)
    both = max(solo.max(), random.uniform(0.5, 1.0) * np.prod(solo))
    if n_users == 2:
        region = TableRegion.of({(0,): d * np.log2(solo[0]), (1,): d * np.log2(solo[1]), (0, 1): d * np.log2(both)})
    else:
        region = TableRegion.of({users: d * np.log2(1 + solo[list(users)].sum()) for users in subsets(3)})
    errors = Neighbourhoods(random.uniform(0.2, 5, n_users), np.full(n_users, 0.5), d)
    levels = whole_levels(errors, region, 1.0)
    assert levels.min() >= 1
    assert relative_excess(region, d * np.log2(levels)) <= 1e-9
    tops = [range(1, int(2 ** (alone / d) + 1e-9) + 1) for alone in region.single_rates()]
    feasible = [each for each in product(*tops) if relative_excess(region, d * np.log2(np.array(each))) <= 1e-9]
    best = min(errors.values(d * np.log2(np.array(each))).sum() for each in feasible)
    assert errors.values(d * np.log2(levels)).sum() == pytest.approx(best, rel=0.02)
    assert errors.values(least_error(errors, region, 1.0)).sum() <= best * (1 + 1e-9)


def test_more_bits_than_anybody_has_a_use_for_are_no_trouble() -> None:
    region = GaussianRegion(np.array([1e20, 3.0, 1e-20]), 1e9)
    errors = Neighbourhoods(np.array([1e-5, 1.0, 1e5]), np.array([0.0, 50.0, 0.0]), 2)
    bits = least_error(errors, region, 3600.0)
    assert relative_excess(region, bits / 3600.0) <= 1e-9
    assert bits.sum() == pytest.approx(3600.0 * capacity(region, (0, 1, 2)))
    assert errors.values(bits)[:2].max() < 1e-100
    assert whole_levels(errors, region, 3600.0)[0] == 2**53


@pytest.mark.parametrize("seed", range(30))
def test_an_allocation_of_least_error_stays_in_the_region(seed: int) -> None:
    random = np.random.default_rng(seed)
    n_users = 1 + seed % 6
    poles = random.choice([0.0, 1.5, 100.0], n_users)
    errors = Neighbourhoods(10 ** random.uniform(-3, 3, n_users), poles, int(random.integers(1, 50)))
    lower = random.integers(0, 31, n_users)
    for region in (gaussian(random, n_users, 9.0), table(random, n_users)):
        bits = MinError().bits(region, 10.0, lower, 10 ** random.uniform(-2, 2, n_users), errors)
        assert ((bits == 0) | (bits >= lower)).all()
        for users in subsets(n_users):
            assert bits[list(users)].sum() <= 10.0 * capacity(region, users) * (1 + 1e-9)


TWO = GaussianRegion(np.array([1.0, 1.0]), 1.0)
NEED = Neighbourhoods(np.ones(2), np.full(2, 100.0), 1)
ONE_UP = Neighbourhoods(np.ones(2), np.ones(2), 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: least_error(NEED, TWO, 1.0), r"users \{0, 1\} need at least 6.64386 bits .* carry 1.58496 in 1 s"),
        (lambda: Neighbourhoods(np.array([np.nan]), np.zeros(1), 1), "user 0: weight = nan"),
        (lambda: Neighbourhoods(np.ones(1), np.array([-1.0]), 1), "poles must be 1 finite"),
        (lambda: Neighbourhoods(np.ones(1), np.ones(1), 0), "dimension = 0"),
        (lambda: whole_levels(ONE_UP, TWO, 1.2), r"lowest whole levels, \[2, 2\], need more than the links carry"),
    ],
)
def test_what_cannot_be_had_is_said_in_one_line(call: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        call()  # type: ignore[operator]
    assert "\n" not in str(error.value)
