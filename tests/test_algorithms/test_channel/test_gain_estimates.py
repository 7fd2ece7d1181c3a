"""Rates planned on estimates of the gains: the law of the error, the uploads that are lost, and causality."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from pydantic import ValidationError

from narrowcast.algorithms.channel.allocation import Equal, MaxMin, MinError, Proportional
from narrowcast.algorithms.channel.curves import DistortionCurves
from narrowcast.algorithms.channel.fading import MultipleAccess, Rayleigh
from narrowcast.algorithms.channel.links import Links
from narrowcast.algorithms.channel.radio import CellRadio
from narrowcast.algorithms.channel.regions import GaussianRegion, Independent, Region, contains, undecodable
from narrowcast.platform.contracts import RateDistortion
from narrowcast.platform.types import IntArray, Profiles
from regions_by_hand import Array, base_inside, capacity, gaussian, subsets, table

CLIENTS = np.arange(50_000)
CHANNELS: list[Any] = [Rayleigh, MultipleAccess]


def profiles(clients: IntArray) -> Profiles:
    ones = np.ones(len(clients))
    return Profiles(clients, ones.astype(np.int64), (1e6 * (1 + clients % 5)).astype(np.float64), 3e6 * ones, ones)


def undecodable_by_hand(region: Region, rates: Array) -> Array:
    """Return the senders outside of the largest set that is decodable with the other senders as noise."""
    sending = set(np.flatnonzero(rates > 0).tolist())
    best: set[int] = set()
    for users in subsets(len(region)):
        noise = tuple(sorted(sending - set(users)))
        given = capacity(region, noise) if noise else 0.0
        fits = all(
            sum(rates[user] for user in part) <= (capacity(region, tuple(sorted({*part, *noise}))) - given) * (1 + 1e-9)
            for part in (tuple(users[place] for place in chosen) for chosen in subsets(len(users)))
        )
        if set(users) <= sending and fits and len(users) > len(best):
            best = set(users)
    return np.array([user in sending - best for user in range(len(region))])


@pytest.mark.parametrize("seed", range(60))
def test_what_is_decoded_is_the_largest_set_with_the_rest_as_noise(seed: int) -> None:
    random = np.random.default_rng(seed)
    n_users = int(random.integers(1, 6))
    for region in (gaussian(random, n_users, 1.0), Independent(random.uniform(0, 5, n_users)), table(random, n_users)):
        rates = random.uniform(0.3, 1.6, n_users) * base_inside(region, random) * (random.random(n_users) < 0.8)
        assert np.array_equal(undecodable(region, rates), undecodable_by_hand(region, rates))


def test_a_weak_signal_is_lost_alone_and_a_strong_one_with_those_it_covers() -> None:
    region = GaussianRegion(np.array([100.0, 1.0]), 1.0)
    alone = region.single_rates()
    assert undecodable(region, np.array([1.0, alone[1] * 1.1])).tolist() == [False, True]
    assert undecodable(region, np.array([alone[0] * 1.01, 0.1])).tolist() == [True, True]
    assert undecodable(region, np.array([alone[0] * 1.01, 0.0])).tolist() == [True, False]
    assert not undecodable(region, np.zeros(2)).any()


@pytest.mark.parametrize("access", ["orthogonal", "shared"])
def test_without_an_error_links_are_those_of_perfect_knowledge(access: Any) -> None:
    links = Rayleigh(access=access, csi_error_decibel=0.0, back_off_decibel=0.0).draw(profiles(CLIENTS[:100]), 0, 1)
    assert links.actual is None
    assert not links.lost_at(links.uplink_bits_per_second * 1e6).any()


@pytest.mark.parametrize("kind", CHANNELS)
@pytest.mark.parametrize("sigma", [3.0, 6.0])
def test_the_error_is_log_normal_and_does_not_move_the_channel(kind: Any, sigma: float) -> None:
    access = {"access": "shared"} if kind is Rayleigh else {}
    exact = kind(**access).draw(profiles(CLIENTS), 0, 1)
    links = kind(**access, csi_error_decibel=sigma, back_off_decibel=2.0).draw(profiles(CLIENTS), 0, 1)
    assert isinstance(links.region, GaussianRegion) and isinstance(links.actual, GaussianRegion)
    assert np.array_equal(links.actual.snr, exact.region.snr)
    error = 10 * np.log10(links.region.snr / links.actual.snr)
    assert abs(error.mean() + 2.0) < 0.02 * sigma
    assert abs(error.std() - sigma) < 0.02 * sigma
    assert abs((((error + 2) / sigma) ** 4).mean() - 3) < 0.15
    assert abs(np.corrcoef(error, np.log(exact.region.snr))[0, 1]) < 0.02
    assert np.array_equal(links.downlink_bits_per_second, exact.downlink_bits_per_second)
    later = kind(**access, csi_error_decibel=sigma).draw(profiles(CLIENTS), 0, 2)
    assert isinstance(later.region, GaussianRegion) and isinstance(later.actual, GaussianRegion)
    assert abs(np.corrcoef(error, np.log(later.region.snr / later.actual.snr))[0, 1]) < 0.02


def test_a_client_alone_is_lost_as_often_as_its_estimate_is_too_high() -> None:
    for back_off, probability in ((0.0, 0.5), (4.0, 0.158655), (-40 / 3, 0.99957)):
        channel = Rayleigh(csi_error_decibel=4.0, back_off_decibel=back_off)
        links = channel.draw(profiles(CLIENTS), 0, 1)
        share = links.lost_at(links.uplink_bits_per_second).mean()
        assert abs(share - probability) < 0.01
        allocated = CellRadio(channel=channel).share(profiles(CLIENTS), None, 0, 1)
        assert allocated.lost is not None and allocated.lost.mean() == share


def test_rates_below_the_gains_are_never_lost() -> None:
    links = Rayleigh(access="shared", back_off_decibel=1.0).draw(profiles(CLIENTS[:60]), 0, 1)
    bits = MaxMin().bits(links.region, 1.0, np.zeros(60, dtype=np.int64))
    assert not links.lost_at(bits / 1.0).any()
    ahead = Rayleigh(access="shared", back_off_decibel=-3.0).draw(profiles(CLIENTS[:60]), 0, 1)
    bits = MaxMin().bits(ahead.region, 1.0, np.zeros(60, dtype=np.int64))
    assert ahead.lost_at(bits / 1.0).any()


class Swapped(Rayleigh):
    """Estimates of gains that turn out to be `factor` times as high."""

    kind: Literal["swapped"] = "swapped"  # type: ignore[assignment]
    factor: float

    def draw(self, profiles: Profiles, seed: int, round_index: int) -> Links:
        links = super().draw(profiles, seed, round_index)
        assert isinstance(links.actual, GaussianRegion)
        return replace(links, actual=GaussianRegion(links.actual.snr * self.factor, links.actual.bandwidth))


@pytest.mark.parametrize("allocation", [MinError(), MaxMin(), Proportional(), Equal()])
def test_the_allocation_sees_the_estimates_alone(allocation: Any) -> None:
    cohort, points = profiles(CLIENTS[:12]), np.geomspace(1e3, 1e5, 20)
    curves = DistortionCurves.of(np.tile(points, (12, 1)), np.tile(1e3 / points, (12, 1)))
    told = RateDistortion(np.full(12, 1000), curves)
    radios = [
        CellRadio(
            channel=Swapped(access="shared", csi_error_decibel=6, factor=factor),
            allocation=allocation,
            upload_seconds=0.05,
        )
        for factor in (10.0, 0.0)
    ]
    good, none = (radio.share(cohort, told, 0, 1) for radio in radios)
    assert good.budget_bits is not None and none.budget_bits is not None and none.lost is not None
    assert np.array_equal(good.budget_bits, none.budget_bits)
    assert np.array_equal(good.uplink_bits_per_second, none.uplink_bits_per_second)
    assert np.array_equal(none.lost, none.budget_bits > 0)
    assert contains(radios[0].channel.draw(cohort, 0, 1).region, good.budget_bits / 0.05)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"csi_error_decibel": -1}, "csi_error_decibel"),
        ({"csi_error_decibel": float("nan")}, "csi_error_decibel"),
        ({"back_off_decibel": float("inf")}, "back_off_decibel"),
        ({"csi_error_decibel": 3, "outage_probability": 0.1}, "without an estimate of the fade; leave out"),
        ({"back_off_decibel": 3, "margin_decibel": 1}, "without an estimate of the fade; leave out"),
    ],
)
def test_estimates_that_make_no_channel_are_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Rayleigh.model_validate(fields)
