"""Laws of fleets, which say who the clients are, and of availability, which says who of them answers in a round."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np

from narrowcast.laws.law import require
from narrowcast.laws.small_tasks import digest
from narrowcast.platform.contracts import Fleet
from narrowcast.platform.rounds.sampling import Availability
from narrowcast.platform.types import BoolArray, Profiles

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
