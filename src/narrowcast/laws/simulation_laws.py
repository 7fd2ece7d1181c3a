"""Laws of fleets: who the clients are; of availability: who of them answers; and of sampling: who is asked."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np

from narrowcast.laws.law import require
from narrowcast.laws.small_tasks import digest
from narrowcast.platform.contracts import Fleet
from narrowcast.platform.rounds.sampling import Availability, Draw, PredictedSeconds, Sampling
from narrowcast.platform.types import BoolArray, IntArray, Profiles

RATES = ("uplink_bits_per_second", "downlink_bits_per_second", "compute_speed")


@dataclass(frozen=True)
class FleetCase:
    """A fleet, and a number of clients."""

    fleet: Fleet
    clients: int

    def profiles(self, seed: int = 0, pickled: bool = False) -> Profiles:
        """Return the profiles of the clients, of whom client u has u + 1 examples."""
        fleet = pickle.loads(pickle.dumps(self.fleet)) if pickled else self.fleet
        profiles: Profiles = fleet.profiles(np.arange(1, self.clients + 1), seed)
        return profiles


def fleet_cases(fleet: Fleet, sizes: tuple[int, ...] = (1, 11, 1000)) -> dict[str, FleetCase]:
    """Return the fleet of one, eleven and a thousand clients."""
    return {f"{size} clients": FleetCase(fleet, size) for size in sizes}


def profiles_are_the_same_in_every_process(case: FleetCase) -> None:
    """Ask twice with seed 3, the second time through pickle and after a draw with seed 4."""
    first = case.profiles(3)
    case.profiles(4)
    again = case.profiles(3, pickled=True)
    equal = all(np.array_equal(getattr(first, name), getattr(again, name)) for name in RATES)
    require(equal, "the same seed gives other profiles")


def there_is_a_profile_for_each_client(case: FleetCase) -> None:
    """Look at the clients and their examples."""
    profiles = case.profiles()
    require(np.array_equal(profiles.client, np.arange(case.clients)), "clients are not numbered 0, 1, ...")
    require(np.array_equal(profiles.examples, np.arange(1, case.clients + 1)), "examples are not those that were given")
    for name in RATES:
        shape = np.shape(getattr(profiles, name))
        require(shape == (case.clients,), f"{name} has the shape {shape}, not [{case.clients}]")


def rates_and_speeds_are_finite_and_above_zero(case: FleetCase) -> None:
    """Look at the links and devices of ten seeds."""
    for seed in range(10):
        profiles = case.profiles(seed)
        for name in RATES:
            values = np.asarray(getattr(profiles, name))
            bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
            require(not bad.size, f"{name} of client {bad[:1]} is {values[bad[:1]]}")


def digest_of_fleet(case: FleetCase) -> str:
    """Return the sha256 of the profiles of two seeds."""
    profiles = {seed: case.profiles(seed) for seed in (0, 3)}
    return digest({f"{name} {seed}": getattr(profile, name) for seed, profile in profiles.items() for name in RATES})


FLEET_LAWS = (
    profiles_are_the_same_in_every_process,
    there_is_a_profile_for_each_client,
    rates_and_speeds_are_finite_and_above_zero,
)


@dataclass(frozen=True)
class AvailabilityCase:
    """A model of availability, and a number of clients that it fits."""

    availability: Availability
    clients: int

    def free(self, seed: int, round_index: int, seconds: float, clients: int | None = None) -> BoolArray:
        """Return who is there, [U]."""
        number = clients or self.clients
        free = self.availability.free(number, seed, round_index, seconds)
        return np.ones(number, dtype=bool) if free is None else free


MOMENTS = [(seed, index, seconds) for seed in (0, 7) for index, seconds in ((1, 0.0), (2, 40.5), (90, 50_000.0))]


def availability_cases(availability: Availability, clients: int = 40) -> dict[str, AvailabilityCase]:
    """Return the only case, after the model's own check."""
    availability.check(clients)
    return {"": AvailabilityCase(availability, clients)}


def who_is_there_depends_on_seed_round_and_time_alone(case: AvailabilityCase) -> None:
    """Ask for several moments forwards, backwards and through pickle."""
    forwards = [case.free(*moment) for moment in MOMENTS]
    backwards = [case.free(*moment) for moment in reversed(MOMENTS)][::-1]
    copied = AvailabilityCase(pickle.loads(pickle.dumps(case.availability)), case.clients)
    elsewhere = [copied.free(*moment) for moment in MOMENTS]
    for moment, *answers in zip(MOMENTS, forwards, backwards, elsewhere, strict=True):
        require(
            all(np.array_equal(answers[0], answer) for answer in answers[1:]),
            f"(seed, round, seconds) = {moment} differ",
        )


def there_is_an_answer_for_each_client(case: AvailabilityCase) -> None:
    """Look at shape and type of the answers."""
    for moment in MOMENTS:
        free: Any = case.free(*moment)
        require(free.shape == (case.clients,), f"the answer has the shape {free.shape}, not [{case.clients}]")
        require(free.dtype == np.bool_, f"the answer is {free.dtype}, not bool")


def a_client_does_not_depend_on_who_else_there_is(case: AvailabilityCase) -> None:
    """Ask for fewer clients."""
    for moment in MOMENTS:
        fewer = case.free(*moment, clients=case.clients // 2)
        require(
            np.array_equal(fewer, case.free(*moment)[: case.clients // 2]),
            f"at (seed, round, seconds) = {moment} the first half of the clients differs without the second",
        )


def digest_of_availability(case: AvailabilityCase) -> str:
    """Return the sha256 of who is there at several moments."""
    return digest({str(moment): case.free(*moment) for moment in MOMENTS})


AVAILABILITY_LAWS = (
    who_is_there_depends_on_seed_round_and_time_alone,
    there_is_an_answer_for_each_client,
    a_client_does_not_depend_on_who_else_there_is,
)


@dataclass(frozen=True)
class Sampled:
    """A sampling, and a number of clients to draw from."""

    sampling: Sampling
    clients: int = 40

    def draw(self, seed: int, round_index: int, free: BoolArray | None = None, size: int = 8) -> IntArray:
        """Return the clients drawn in a round."""
        rotation, examples = self.sampling.order(seed, self.clients), 1 + np.arange(self.clients) % 5
        first = (round_index - 1) * size
        draw = Draw(size, seed, round_index, rotation, first, free, examples, predicted=_predicted)
        return self.sampling.draw(draw)


def _predicted(clients: IntArray) -> PredictedSeconds:
    """Return seconds of each client of its own, of which a few add up to a minute."""
    download, compute, upload = (
        (first + clients % period).astype(np.float64) for first, period in ((1, 3), (2, 5), (3, 7))
    )
    return PredictedSeconds(download, compute, upload, 1.0)


DRAWS = [(seed, round_index) for seed in (0, 7) for round_index in (1, 2, 90)]


def sampling_cases(sampling: Sampling) -> dict[str, Sampled]:
    """Return the only case."""
    return {"": Sampled(sampling)}


def a_draw_depends_on_its_arguments_alone(case: Sampled) -> None:
    """Draw several rounds forwards, backwards and through pickle."""
    forwards = [case.draw(*moment) for moment in DRAWS]
    backwards = [case.draw(*moment) for moment in reversed(DRAWS)][::-1]
    copied = Sampled(pickle.loads(pickle.dumps(case.sampling)))
    elsewhere = [copied.draw(*moment) for moment in DRAWS]
    for moment, *answers in zip(DRAWS, forwards, backwards, elsewhere, strict=True):
        same = all(np.array_equal(answers[0], answer) for answer in answers[1:])
        require(same, f"the clients of (seed, round) = {moment} differ")


def clients_are_drawn_of_those_that_are_free(case: Sampled) -> None:
    """Draw of all clients, of every third, of one and of none."""
    everyone, numbers = np.ones(case.clients, dtype=bool), np.arange(case.clients)
    for free in (None, everyone, numbers % 3 == 0, numbers == 3, ~everyone):
        for moment in DRAWS:
            drawn: Any = case.draw(*moment, free)
            require(np.issubdtype(drawn.dtype, np.integer), f"clients are {drawn.dtype}, not integers")
            require(((drawn >= 0) & (drawn < case.clients)).all(), f"it draws {drawn} of {case.clients} clients")
            require(free is None or free[drawn].all(), f"it draws {drawn}, of whom some are not free")
            require(len(np.unique(drawn)) == len(drawn), f"it draws {drawn}, a client twice")
            require(not case.sampling.bounded or len(drawn) <= 8, f"it draws {len(drawn)} clients for 8")


def every_client_is_drawn_and_seeds_draw_others(case: Sampled) -> None:
    """Draw 300 rounds with two seeds."""
    of_seeds = [[case.draw(seed, number) for number in range(1, 301)] for seed in (0, 7)]
    never = set(range(case.clients)) - set(np.concatenate(of_seeds[0]).tolist())
    require(not never, f"in 300 rounds it never draws {sorted(never)[:3]}")
    same = all(np.array_equal(np.sort(one), np.sort(other)) for one, other in zip(*of_seeds, strict=True))
    require(not same, "seeds 0 and 7 draw the same clients in every round")


def digest_of_sampling(case: Sampled) -> str:
    """Return the sha256 of the clients of several rounds."""
    return digest({str(moment): case.draw(*moment) for moment in DRAWS})


SAMPLING_LAWS = (
    a_draw_depends_on_its_arguments_alone,
    clients_are_drawn_of_those_that_are_free,
    every_client_is_drawn_and_seeds_draw_others,
)
