"""Rate regions compared with the list of all their constraints."""

from __future__ import annotations

import numpy as np
import pytest

from narrowcast.algorithms.channel.regions import GaussianRegion, Independent, Region, TableRegion, contains
from narrowcast.platform.errors import UserError
from regions_by_hand import base_inside, capacity, gaussian, subsets, table, worst_excess


def some_regions(seed: int) -> list[Region]:
    random = np.random.default_rng(seed)
    n_users = int(random.integers(1, 7))
    return [gaussian(random, n_users), Independent(random.uniform(0, 5, n_users)), table(random, n_users)]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_the_most_violated_set_is_that_of_all_sets(kind: int, seed: int) -> None:
    region = some_regions(seed)[kind]
    random = np.random.default_rng(1000 + seed)
    rates = random.uniform(0, 2, len(region)) * base_inside(region, random)
    everyone = np.arange(len(region))
    excess, mask = region.most_violated(rates)
    expected = max(0.0, worst_excess(region, rates))
    scale = region.capacity_of(everyone)
    assert abs(excess - expected) <= 1e-12 * scale
    assert mask.any() == (excess > 0)
    if mask.any():
        users = tuple(np.flatnonzero(mask).tolist())
        assert abs(rates[list(users)].sum() - capacity(region, users) - expected) <= 1e-12 * scale


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_what_is_given_away_is_noise_to_the_others(kind: int, seed: int) -> None:
    region = some_regions(seed)[kind]
    everyone = np.arange(len(region))
    for given in subsets(len(region))[:-1]:
        others = np.setdiff1d(everyone, given)
        rest = region.contracted(np.array(given, dtype=np.int64))
        left = capacity(region, tuple(everyone)) - capacity(region, given)
        assert rest.capacity_of(np.arange(len(others))) == pytest.approx(left, rel=1e-9, abs=1e-12)
        # rates at the remaining capacity are feasible; above it, the excess is the difference
        rates = np.zeros(len(others))
        for place, user in enumerate(others):
            before = (*given, *others[:place].tolist())
            rates[place] = capacity(region, (*before, int(user))) - capacity(region, before)
        excess, _ = rest.most_violated(rates)
        assert excess <= 1e-12 * region.capacity_of(everyone)
        excess, mask = rest.most_violated(rates + 1.0)
        assert excess >= len(others) - 1e-9
        assert mask.any()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_room_is_the_least_slack_of_a_user_s_sets(kind: int, seed: int) -> None:
    region = some_regions(seed)[kind]
    random = np.random.default_rng(2000 + seed)
    rates = random.uniform(0, 1.2, len(region)) * base_inside(region, random)
    rates[random.random(len(region)) < 0.2] = 0.0
    expected = [
        min(capacity(region, users) - rates[list(users)].sum() for users in subsets(len(region)) if user in users)
        for user in range(len(region))
    ]
    slack, limiting = region.slack(rates)
    scale = 1e-12 * region.capacity_of(np.arange(len(region)))
    assert slack == pytest.approx(np.array(expected), rel=1e-9, abs=scale)
    assert limiting.diagonal().all()
    for user in range(len(region)):
        users = tuple(np.flatnonzero(limiting[user]).tolist())
        assert capacity(region, users) - rates[list(users)].sum() == pytest.approx(slack[user], rel=1e-9, abs=scale)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_part_of_a_region_is_the_region_of_that_part(kind: int) -> None:
    region = some_regions(2)[kind]
    users = np.arange(len(region))[::-2]
    part = region.take(users)
    assert len(part) == len(users)
    assert np.array_equal(part.single_rates(), region.single_rates()[users])
    for few in subsets(len(users)):
        assert part.capacity_of(np.array(few)) == pytest.approx(region.capacity_of(users[list(few)]), rel=1e-12)


def test_contains_is_the_boundary_and_what_is_below() -> None:
    region = GaussianRegion(np.array([3.0, 1.0]), 2.0)
    corner = np.array([4.0, 2 * np.log2(5) - 4])
    assert contains(region, corner)
    assert not contains(region, corner * (1 + 1e-6))
    assert not contains(region, np.array([-1e-3, 0.0]))
    assert not contains(region, np.array([4.001, 0.0]))


def test_a_weak_user_is_held_to_its_own_capacity_beside_strong_ones() -> None:
    region = GaussianRegion(np.array([1e12, 1e-12, 1e9]), 1e6)
    corner = np.array([0.0, region.single_rates()[1], region.single_rates()[2]])
    corner[0] = region.contracted(np.array([1, 2])).capacity_of(np.array([0]))
    assert contains(region, corner * (1 - 1e-12))
    for user in range(3):
        over = corner.copy()
        over[user] *= 1.001
        assert not contains(region, over)
    table_region = TableRegion.of({(0,): 1e12, (1,): 1e-3, (0, 1): 1e12 + 1e-3})
    assert contains(table_region, np.array([1e12, 1e-3]))
    assert not contains(table_region, np.array([1e12, 2e-3]))


def test_a_user_without_signal_has_no_rate() -> None:
    region = GaussianRegion(np.array([0.0, 3.0]), 1.0)
    assert region.single_rates().tolist() == [0.0, 2.0]
    excess, mask = region.most_violated(np.array([0.5, 2.0]))
    assert excess == 0.5
    assert mask[0]
    assert contains(region, np.array([0.0, 2.0]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GaussianRegion(np.array([1.0, np.nan]), 1.0), "user 1: SNR = nan"),
        (lambda: GaussianRegion(np.array([-1.0]), 1.0), "user 0: SNR = -1.0"),
        (lambda: GaussianRegion(np.array([np.inf]), 1.0), "user 0: SNR = inf"),
        (lambda: GaussianRegion(np.array([1.0]), -5.0), "bandwidth = -5.0 Hz"),
        (lambda: GaussianRegion(np.array([1.0]), float("nan")), "bandwidth = nan Hz"),
        (lambda: GaussianRegion(np.empty(0), 1.0), "at least one user"),
        (lambda: Independent(np.array([1.0, -2.0])), "user 1: rate = -2.0"),
        (lambda: Independent(np.empty(0)), "at least one user"),
        (lambda: TableRegion.of({}), "got 0"),
        (lambda: TableRegion.of({(0,): 1, (1,): 1}), r"no number for \{0, 1\}"),
        (lambda: TableRegion.of({(0,): 1, (-1,): 1}), r"count from 0; got \{-1\}"),
        (lambda: TableRegion.of({(): 1, (0,): 1}), r"R\{\} = 1; it must be 0"),
        (lambda: TableRegion.of({(0,): float("inf")}), r"R\{0\} = inf; it must be finite"),
        (lambda: TableRegion.of({(0,): -1}), r"not monotone: R\{0\} = -1 is below R\{\} = 0"),
        (lambda: TableRegion.of({(0,): 2, (1,): 1, (0, 1): 1.5}), r"not monotone: R\{0, 1\} = 1.5 is below R\{0\} = 2"),
        (
            lambda: TableRegion.of({(0,): 2, (1,): 1, (0, 1): 3.5}),
            r"not submodular: R\{0\} \+ R\{1\} = 3 is below R\{0, 1\} \+ R\{\} = 3.5",
        ),
        (
            lambda: TableRegion.of({(0,): 2, (1,): 2, (2,): 2, (0, 1): 3, (0, 2): 3, (1, 2): 3, (0, 1, 2): 4.5}),
            r"not submodular: R\{0, 2\} \+ R\{1, 2\} = 6 is below R\{0, 1, 2\} \+ R\{2\} = 6.5|R\{0, 1, 2\}",
        ),
        (lambda: TableRegion.of({(12,): 1.0}), "1 to 12 users"),
    ],
)
def test_what_is_no_region_is_refused(make: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        make()  # type: ignore[operator]
    assert "\n" not in str(error.value)
