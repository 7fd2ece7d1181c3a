"""Exact allocation compared with general solvers, and the feasibility of every rule."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from narrowcast.algorithms.channel.allocation import (
    Allocation,
    Equal,
    MaxMin,
    MinError,
    Proportional,
    affordable,
    least_error,
    whole_points,
)
from narrowcast.algorithms.channel.curves import DistortionCurves, ErrorCurves, Shares
from narrowcast.algorithms.channel.regions import GaussianRegion, Independent, Region, contains
from narrowcast.platform.errors import UserError
from regions_by_hand import (
    Array,
    base_inside,
    capacity,
    constraints,
    gaussian,
    relative_excess,
    solved_by_slsqp,
    subsets,
    table,
)

RULES: tuple[Allocation, ...] = (MinError(), MaxMin(), Proportional(), Equal())


def a_problem(seed: int) -> tuple[Region, float, Array, Array]:
    """Return region, seconds, feasible lower bounds, and an interior point as a solver's start."""
    random = np.random.default_rng(seed)
    n_users = 2 + seed % 7
    region = gaussian(random, n_users, 2.0) if seed % 3 else table(random, n_users)
    inside = base_inside(region, random)
    seconds = float(random.uniform(1, 12)) / inside.mean()
    start = seconds * inside
    lower = np.where(random.random(n_users) < 0.4, random.uniform(0, 0.9, n_users) * start, 0.0)
    return region, seconds, lower, start


@pytest.mark.parametrize("seed", range(100))
def test_least_error_is_that_of_a_general_solver(seed: int) -> None:
    region, seconds, lower, start = a_problem(seed)
    errors = Shares(10 ** np.random.default_rng(seed).uniform(-1, 1, len(region)))
    bits = least_error(errors, region, seconds, lower)
    assert (bits >= lower - 1e-9).all()
    assert relative_excess(region, bits / seconds) <= 1e-9

    def objective(x: Array, scale: float) -> tuple[float, Array]:
        return float((errors.share**2 / x).sum() / scale), -((errors.share / x) ** 2) / scale

    solved, scale, outside = solved_by_slsqp(objective, region, seconds, lower, start)
    ours = errors.values(bits).sum() / scale
    assert ours <= solved.fun * (1 + 1e-6) + outside * np.abs(solved.jac).max() * len(region)
    assert ours >= solved.fun * (1 - 1e-6)


@pytest.mark.parametrize("seed", range(60))
def test_curves_give_what_a_linear_program_gives(seed: int) -> None:
    random = np.random.default_rng(seed)
    n_users, n_points = 2 + seed % 4, 1 + seed % 6
    region = gaussian(random, n_users) if seed % 2 else table(random, n_users)
    inside = base_inside(region, random)
    bits = np.cumsum(random.uniform(0, 1, (n_users, n_points)), axis=1) * inside[:, None]
    bits[:, 0] *= random.integers(0, 2, n_users) * 0.3
    curves = DistortionCurves.of(bits, random.uniform(0, 1, (n_users, n_points)), random.uniform(0.1, 3, n_users))
    lower = random.uniform(0, 0.3, n_users) * inside
    solution = least_error(curves, region, 1.0, lower)
    assert (solution >= np.maximum(lower, curves.min_bits()) - 1e-12).all()
    assert (solution <= np.maximum(curves.max_bits(), lower) + 1e-12).all()
    assert relative_excess(region, solution) <= 1e-9

    # as a mixture of points, all of them: x = sum of shares x bits, at least `lower`, within every constraint
    matrix, limits = constraints(region, 1.0)
    shares = np.kron(np.eye(n_users), np.ones(n_points))
    to_bits = np.kron(np.eye(n_users), np.ones(n_points)) * bits.ravel()
    distortion = random_distortion(seed, n_users, n_points)
    # a user may be given more than it has points for, so a slack variable takes the rest of `lower`
    solved = linprog(
        np.concatenate([(curves.weight[:, None] * distortion).ravel(), np.zeros(n_users)]),
        A_ub=np.block([[matrix @ to_bits, matrix], [-to_bits, -np.eye(n_users)]]),
        b_ub=np.concatenate([limits, -lower]),
        A_eq=np.block([shares, np.zeros((n_users, n_users))]),
        b_eq=np.ones(n_users),
    )
    assert solved.success
    assert curves.values(solution).sum() == pytest.approx(solved.fun, rel=1e-6, abs=1e-9)


def random_distortion(seed: int, n_users: int, n_points: int) -> Array:
    """Draw the distortions of `test_curves_...` again."""
    random = np.random.default_rng(seed)
    region = gaussian(random, n_users) if seed % 2 else table(random, n_users)
    base_inside(region, random)
    random.uniform(0, 1, (n_users, n_points))
    random.integers(0, 2, n_users)
    return random.uniform(0, 1, (n_users, n_points))


@pytest.mark.parametrize("seed", range(20))
def test_a_hull_is_the_lowest_line_between_points(seed: int) -> None:
    random = np.random.default_rng(seed)
    bits, distortion = random.integers(0, 20, (1, 9)).astype(float), random.uniform(0, 1, (1, 9))
    curve = DistortionCurves.of(bits, distortion)
    for x in np.linspace(bits.min(), 25, 40):
        chords = [
            distortion[0, i] + (x - bits[0, i]) / (bits[0, j] - bits[0, i]) * (distortion[0, j] - distortion[0, i])
            for i, j in product(range(9), repeat=2)
            if bits[0, i] < x <= bits[0, j]
        ]
        lowest = min([*chords, *distortion[0][bits[0] <= x]])
        assert curve.values(np.array([x]))[0] == pytest.approx(lowest, rel=1e-12)
    assert curve.values(np.array([bits.min() - 0.5]))[0] == np.inf


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_filled_from_the_bottom(seed: int) -> None:
    """Water filling in small steps: raise all users that can still rise, in proportion to their shares."""
    random = np.random.default_rng(seed)
    n_users = 2 + seed % 4
    region = gaussian(random, n_users) if seed % 2 else table(random, n_users)
    share = random.uniform(0.5, 2, n_users)
    exact = least_error(Shares(share), region, 1.0)
    level, step, rising = np.zeros(n_users), region.capacity_of(np.arange(n_users)) / 4000, np.ones(n_users, dtype=bool)
    while rising.any():
        for user in np.flatnonzero(rising):
            raised = level.copy()
            raised[user] += step * share[user]
            rising[user] = contains(region, raised)
            level = raised if rising[user] else level
    assert np.abs(exact - level).max() <= 3 * n_users * step * share.max()


def test_most_points_are_the_very_best() -> None:
    hits = 0
    for seed in range(60):
        random = np.random.default_rng(seed)
        n_users, n_points = 3, 4
        region = gaussian(random, n_users, 1.0)
        bits = np.cumsum(random.uniform(0, 1, (n_users, n_points)), axis=1) * region.capacity_of(np.arange(3)) / 4
        bits[:, 0] = 0.0
        distortion = -np.sort(-random.uniform(0, 1, (n_users, n_points)), axis=1)
        curves = DistortionCurves.of(bits, distortion)
        points = whole_points(curves, region, 1.0)
        chosen = bits[np.arange(3), points]
        assert relative_excess(region, chosen) <= 1e-9
        options = [np.array(each) for each in product(range(n_points), repeat=n_users)]
        fitting = [each for each in options if relative_excess(region, bits[np.arange(3), each]) <= 1e-9]
        best = min(distortion[np.arange(3), each].sum() for each in fitting)
        ours = distortion[np.arange(3), points].sum()
        assert ours >= best - 1e-12
        # the lower bound, and the cost of rounding: at most one user's whole curve
        assert curves.values(least_error(curves, region, 1.0)).sum() <= best + 1e-12
        assert ours <= best + 0.4
        hits += ours <= best + 1e-12
    assert hits >= 50


def rules_and_errors(random: np.random.Generator, n_users: int) -> list[tuple[Allocation, ErrorCurves | None]]:
    curve = DistortionCurves.of(random.integers(0, 1000, (n_users, 5)), random.uniform(0, 1, (n_users, 5)))
    return [
        (MinError(), Shares(10 ** random.uniform(-3, 3, n_users))),
        (MinError(), curve),
        (MaxMin(), None),
        (Proportional(), None),
        (Equal(), None),
    ]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n_users=st.integers(1, 6),
    decades=st.floats(0, 9),
    seconds=st.floats(1e-3, 1e3),
    demand=st.sampled_from([0, 1, 30, 10_000]),
)
def test_no_rule_ever_leaves_the_region(seed: int, n_users: int, decades: float, seconds: float, demand: int) -> None:
    random = np.random.default_rng(seed)
    lower = random.integers(0, demand + 1, n_users)
    weights = 10 ** random.uniform(-2, 2, n_users)
    for region in (
        gaussian(random, n_users, decades),
        table(random, n_users),
        Independent(10 ** random.uniform(-2, 4, n_users)),
    ):
        for rule, errors in rules_and_errors(random, n_users):
            bits = rule.bits(region, seconds, lower, weights, errors)
            assert bits.dtype == np.int64
            assert ((bits == 0) | (bits >= lower)).all()
            for users in subsets(n_users):
                assert bits[list(users)].sum() <= seconds * capacity(region, users) * (1 + 1e-9)


@pytest.mark.parametrize("rule", [MinError(), MaxMin(), Proportional()])
def test_nothing_is_left_over(rule: Allocation) -> None:
    random = np.random.default_rng(4)
    region = gaussian(random, 6)
    errors = Shares(np.ones(6))
    bits = rule.bits(region, 100.0, np.zeros(6, dtype=np.int64), None, errors)
    assert 0 <= 100.0 * capacity(region, tuple(range(6))) - bits.sum() < 6


def test_proportional_shares_follow_the_links_and_max_min_evens_them_out() -> None:
    region = GaussianRegion(np.array([15.0, 15.0, 1.0]), 1000.0)
    nobody = np.zeros(3, dtype=np.int64)
    everything = 1000 * np.log2(32)
    proportional = Proportional().bits(region, 1.0, nobody)
    assert np.abs(proportional - everything * np.array([4, 4, 1]) / 9).max() <= 1
    assert MaxMin().bits(region, 1.0, nobody).tolist() == [2000, 2000, 1000]
    assert Equal().bits(region, 1.0, nobody).tolist() == [1000, 1000, 1000]
    weighted = MaxMin().bits(region, 1.0, nobody, np.array([3.0, 1.0, 1.0]))
    assert np.abs(weighted - [3000, 1000, 1000]).max() <= 1


def test_who_cannot_afford_its_least_sends_nothing_and_the_rest_share() -> None:
    region = GaussianRegion(np.array([15.0, 15.0, 0.1]), 1000.0)
    lower = np.full(3, 500)
    errors = Shares(np.ones(3))
    for rule in RULES:
        bits = rule.bits(region, 1.0, lower, None, errors)
        assert bits[2] == 0
        assert abs(bits[:2].sum() - 1000 * np.log2(31)) <= 2
    assert (MinError().bits(region, 0.01, lower, None, errors) == 0).all()
    assert (Equal().bits(region, 0.01, lower) == 0).all()
    # a user that needs more than the whole capacity is left out, which frees it for the others
    assert Equal().bits(region, 1.0, np.array([3500, 0, 0])).tolist()[0] == 0


@pytest.mark.parametrize("seed", range(40))
def test_as_many_take_part_as_can(seed: int) -> None:
    random = np.random.default_rng(seed)
    region = gaussian(random, 6, 2.0)
    lower = np.full(6, random.uniform(0.2, 1.2) * region.capacity_of(np.arange(6)) / 6)
    inside = affordable(region, 1.0, lower)
    fitting = [
        len(users)
        for users in subsets(6)
        if relative_excess(region, np.where(np.isin(np.arange(6), users), lower, 0.0)) <= 1e-9
    ]
    assert inside.sum() == max(fitting, default=0)
    assert relative_excess(region, np.where(inside, lower, 0.0)) <= 1e-9


@pytest.mark.parametrize("seed", range(40))
def test_nobody_is_left_out_who_would_fit(seed: int) -> None:
    random = np.random.default_rng(seed)
    region = table(random, 5) if seed % 2 else gaussian(random, 5, 2.0)
    lower = random.uniform(0, 1.5, 5) * base_inside(region, random)
    inside = affordable(region, 1.0, lower)
    assert relative_excess(region, np.where(inside, lower, 0.0)) <= 1e-9
    for user in np.flatnonzero(~inside):
        more = inside | (np.arange(5) == user)
        assert relative_excess(region, np.where(more, lower, 0.0)) > 1e-9


def test_a_point_is_what_a_client_sends_and_is_paid_for() -> None:
    curves = DistortionCurves.of(np.array([[10, 40, 100], [20, 30, 200]]), np.array([[1.0, 0.5, 0.2], [1.0, 0.6, 0.1]]))
    bits = MinError().bits(Independent(np.array([99.0, 19.0])), 1.0, np.zeros(2, dtype=np.int64), None, curves)
    assert bits.tolist() == [40, 0]
    bits = MinError().bits(Independent(np.array([99.0, 500.0])), 1.0, np.array([50, 25]), None, curves)
    assert bits.tolist() == [0, 200]
    bits = MinError().bits(Independent(np.array([500.0, 500.0])), 1.0, np.array([101, 25]), None, curves)
    assert bits.tolist() == [0, 200], "no point of the first client's curve has the bits it needs"


def test_more_bits_than_anybody_has_a_use_for_are_no_trouble() -> None:
    region = GaussianRegion(np.array([1e20, 3.0, 1e-20]), 1e9)
    curves = DistortionCurves.of(np.array([[0, 10]] * 3), np.array([[1.0, 0.0]] * 3))
    assert MinError().bits(region, 3600.0, np.zeros(3, dtype=np.int64), None, curves).tolist() == [10, 10, 0]


def test_dominated_points_are_left_out() -> None:
    curve = DistortionCurves.of(np.array([[30, 10, 20, 10, 40]]), np.array([[0.5, 0.9, 0.95, 0.7, 0.5]]))
    assert curve.bits.tolist() == [[10, 30, 30, 30, 30]]
    assert curve.distortion.tolist() == [[0.7, 0.5, 0.5, 0.5, 0.5]]
    assert curve.floor(np.array([9.0])).tolist() == [-1]
    assert [curve.floor(np.array([x]))[0] for x in (10.0, 29.0, 30.0, 1e9)] == [0, 0, 1, 1]
    assert [curve.ceiling(np.array([x]))[0] for x in (0.0, 10.0, 10.5, 30.0, 31.0)] == [0, 0, 1, 1, 5]
    assert curve.point_bits(np.array([5])).tolist() == [np.inf]


TWO = GaussianRegion(np.array([1.0, 1.0]), 1.0)
NEED = DistortionCurves.of(np.array([[3.5, 9.0], [3.25, 9.0]]), np.array([[1.0, 0.0], [1.0, 0.0]]))
ONE_POINT = DistortionCurves.of(np.full((2, 1), 2.0), np.ones((2, 1)))
FAR_POINTS = DistortionCurves.of(np.array([[1.0, 9.0], [1.0, 9.0]]), np.array([[1.0, 0.0], [1.0, 0.0]]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: least_error(NEED, TWO, 1.0), r"users \{0, 1\} need at least 6.75 bits .* carry 1.58496 in 1 s"),
        (
            lambda: least_error(Shares(np.ones(2)), TWO, 1.0, np.array([1.5, 0.0])),
            r"users \{0\} need at least 1.5 bits",
        ),
        (lambda: least_error(Shares(np.ones(2)), TWO, 0.0), "seconds = 0.0"),
        (lambda: least_error(Shares(np.ones(3)), TWO, 1.0), "2 links, but errors of 3 users and 2 lower bounds"),
        (lambda: least_error(NEED, TWO, 1.0, np.zeros(1)), "2 links, but errors of 2 users and 1 lower bounds"),
        (lambda: least_error(NEED, TWO, 1.0, np.array([0.0, np.nan])), "lower bounds must be 2 finite numbers"),
        (lambda: MaxMin().bits(TWO, float("nan"), np.zeros(2, dtype=int)), "seconds = nan"),
        (lambda: MaxMin().bits(TWO, 1.0, np.zeros(3, dtype=int)), "lower bounds must be 2 finite numbers"),
        (lambda: Equal().bits(TWO, 1.0, np.array([-1, 0])), "none negative"),
        (lambda: MaxMin().bits(TWO, 1.0, np.zeros(2, dtype=int), np.array([1.0, 0.0])), "user 1: weight = 0.0"),
        (lambda: MinError().bits(TWO, 1.0, np.zeros(2, dtype=int), np.ones(3), NEED), "got 3 weights for 2 users"),
        (lambda: MinError().bits(TWO, 1.0, np.zeros(2, dtype=int)), "needs the clients' errors"),
        (lambda: MinError().bits(TWO, 1.0, np.zeros(2, dtype=int), None, NEED.take(np.array([0]))), "1 clients for 2"),
        (lambda: Shares(np.array([np.nan])), "user 0: weight = nan"),
        (lambda: DistortionCurves.of(np.ones((2, 3)), np.ones((2, 4))), r"\(2, 3\) and \(2, 4\)"),
        (lambda: DistortionCurves.of(np.array([[1.0, -1.0]]), np.ones((1, 2))), r"user 0, point 1: \(-1.0 bits"),
        (lambda: DistortionCurves.of(np.ones((1, 1)), np.array([[np.nan]])), "distortion nan"),
        (lambda: whole_points(ONE_POINT, TWO, 9.0, np.array([0.0, 3.0])), "user 1: at least 3 bits.* ends at 2 bits"),
        (lambda: whole_points(FAR_POINTS, TWO, 9.0, np.array([5.0, 5.0])), "first points above the lower bounds"),
    ],
)
def test_what_cannot_be_had_is_said_in_one_line(call: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        call()  # type: ignore[operator]
    assert "\n" not in str(error.value)
