"""Cohorts in two bands: rates by hand, splits against all splits of a small cohort, and a run over such a radio."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import narrowcast as nc
from narrowcast.algorithms.channel.regions import InterferenceRegion
from narrowcast.algorithms.channel.two_bands import TwoBands, lost_rates, split_cohort, within
from narrowcast.laws.radio_laws import profiles_of
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import FloatArray

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "two-bands.yaml"
RULES: tuple[Any, ...] = ("max_cut", "greedy", "local_search", "random")
GAINS = np.array([[8.0, 1.0, 3.0], [0.5, 4.0, 0.0], [2.0, 0.25, 10.0]])


def cohort(size: int, seed: int = 0, **fields: Any) -> FloatArray:
    return TwoBands(**fields).gains(profiles_of(np.arange(size)), seed, 1)


def test_rates_are_those_of_a_formula_by_hand() -> None:
    region = InterferenceRegion(GAINS, np.array([0, 1, 0]), 2e5)
    wanted = 2e5 * np.log2([1 + 8 / (1 + 3), 1 + 4, 1 + 10 / (1 + 2)])
    np.testing.assert_allclose(region.rates, wanted, rtol=1e-14)
    np.testing.assert_allclose(region.take(np.array([0])).rates, [2e5 * np.log2(9)], rtol=1e-14)
    np.testing.assert_allclose(region.take(np.array([1, 2])).rates, 2e5 * np.log2([5, 11]), rtol=1e-14)
    np.testing.assert_allclose(region.contracted(np.array([2, 1])).rates, wanted[:1], rtol=1e-14)
    assert region.capacity_of(np.array([0, 2])) == pytest.approx(wanted[0] + wanted[2])


def test_lost_rates_are_of_both_clients_and_bound_the_loss_of_a_band() -> None:
    lost = lost_rates(GAINS)
    assert lost[0, 2] == lost[2, 0] == pytest.approx(np.log2(9 / (1 + 8 / 4)) + np.log2(11 / (1 + 10 / 3)))
    assert not lost.diagonal().any()
    gains = cohort(30, access_points=9)
    for seed in range(5):
        bands = np.random.default_rng(seed).integers(0, 2, 30)
        rates = InterferenceRegion(gains, bands, 1.0).rates
        assert np.log2(1 + np.diag(gains)).sum() - rates.sum() <= within(lost_rates(gains), bands) + 1e-9


@pytest.mark.parametrize("rule", RULES)
def test_splits_are_near_the_best_of_all(rule: Any) -> None:
    weights = lost_rates(cohort(11, seed=3, access_points=4))
    every = [within(weights, np.array([0, *bands])) for bands in itertools.product((0, 1), repeat=10)]
    found = split_cohort(weights, rule, 7, 50)
    assert set(found.tolist()) <= {0, 1} and found.shape == (11,)
    value = within(weights, found)
    if rule in ("max_cut", "local_search"):
        assert value == pytest.approx(min(every), rel=1e-12)
    elif rule == "greedy":
        assert value <= np.quantile(every, 0.1)
    assert min(every) - 1e-12 <= value


def test_local_search_ends_where_no_move_helps() -> None:
    weights = lost_rates(cohort(25, seed=1))
    bands = split_cohort(weights, "local_search", 0, 1)
    for client in range(25):
        moved = bands.copy()
        moved[client] = 1 - moved[client]
        assert within(weights, moved) >= within(weights, bands) - 1e-9


def test_a_cohort_without_interference_is_split_at_random() -> None:
    weights = lost_rates(np.diag([3.0, 4.0, 5.0]))
    assert np.array_equal(split_cohort(weights, "max_cut", 4, 10), split_cohort(weights, "random", 4, 10))
    single = TwoBands().draw(profiles_of(np.array([5])), 0, 1)
    np.testing.assert_allclose(single.region.single_rates(), single.uplink_bits_per_second)


def test_the_best_split_has_a_higher_sum_rate_than_coins() -> None:
    sums = {}
    for rule in ("max_cut", "random"):
        channel = TwoBands(split=rule, access_points=9)
        drawn = [channel.draw(profiles_of(np.arange(20)), seed, 1).region.single_rates().sum() for seed in range(40)]
        sums[rule] = np.array(drawn)
    gain = sums["max_cut"] - sums["random"]
    assert gain.mean() > 4 * gain.std() / np.sqrt(len(gain))


def test_rates_change_with_fading_blocks_alone() -> None:
    channel, profiles = TwoBands(coherence=2), profiles_of(np.arange(6))
    rates = [channel.draw(profiles, 0, index).region.single_rates() for index in (1, 2, 3)]
    assert np.array_equal(rates[0], rates[1]) and not np.array_equal(rates[1], rates[2])


@pytest.mark.parametrize("rule", ["max_cut", "local_search", "random"])
def test_blocks_and_seeds_have_draws_of_their_own(rule: Any) -> None:
    """A seed's second block is not the next seed's first: over many pairs half of the coins of two splits agree."""
    weights = lost_rates(cohort(40)) if rule == "random" else np.ones((40, 40)) - np.eye(40)
    agree = []
    for seed in range(20):
        ours, theirs = split_cohort(weights, rule, seed, 1, 1), split_cohort(weights, rule, seed + 1, 1, 0)
        agree.append(max(np.mean(ours == theirs), np.mean(ours != theirs)))
        assert np.array_equal(ours, split_cohort(weights, rule, seed, 1, 1))
    assert max(agree) < 1.0 and np.mean(agree) < 0.75


def test_bad_input_is_refused() -> None:
    with pytest.raises(UserError, match="should be 'max_cut', 'greedy', 'local_search' or 'random'"):
        TwoBands(split="best")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="greater than or equal to 1"):
        TwoBands(access_points=0)
    with pytest.raises(UserError, match="cohort is empty"):
        TwoBands().draw(profiles_of(np.arange(0)), 0, 1)
    with pytest.raises(UserError, match="set its time per round with"):
        next(iter(nc.rounds("fedavg-digits", {"radio": {"channel": {"kind": "two_bands"}}}, backend="local")))


def test_a_run_over_two_bands_sends_within_its_rates() -> None:
    radio = {"channel": {"kind": "two_bands"}, "allocation": "proportional", "upload_seconds": 0.5}
    given = {"rounds": 2, "radio": radio, "evaluate_every": 2}
    first, again = ([*nc.rounds("fedavg-digits", given, backend="local")] for _ in range(2))
    assert [each.record.uplink_bits for each in first] == [each.record.uplink_bits for each in again]
    assert all(each.record.uplink_bits > 0 for each in first)


def test_the_example_of_the_documentation_runs() -> None:
    rounds = [*nc.rounds(EXAMPLE, {"rounds": 2}, backend="local")]
    assert len(rounds) == 2 and all(each.record.uplink_bits > 0 for each in rounds)
