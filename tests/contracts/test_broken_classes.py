"""Laws fail on classes made to break them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict

from narrowcast.algorithms.channel.allocation import Equal
from narrowcast.algorithms.channel.downlink import Unicast
from narrowcast.algorithms.channel.fixed import Fixed
from narrowcast.algorithms.codecs.cast import Cast
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.catalog import FLEETS
from narrowcast.laws import (
    algorithm_laws,
    codec_laws,
    configuration,
    data_laws,
    execution_laws,
    model_laws,
    radio_laws,
    simulation_laws,
    training_laws,
)
from narrowcast.laws.law import judge
from narrowcast.laws.rehearsal import N_CLIENTS, samples
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.schedule import Synchronous
from narrowcast.platform.simulation.availability import Bernoulli
from narrowcast.platform.simulation.fleet import LogNormalFleet
from narrowcast.platform.types import Profiles
from narrowcast.tuning import sampler_laws
from narrowcast.tuning.pruning import NoPruning
from narrowcast.tuning.samplers import RandomSearch

_CALLS: list[int] = []  # state between calls, which no class may keep


def count() -> int:
    _CALLS.append(1)
    return len(_CALLS)


def broken_by(laws: Any, cases: Any) -> dict[str, str]:
    return {each.law.replace(" ", "_"): each.reason for each in judge(laws, cases) if each.reason}


class Drifting(FedAvg):
    def step(self, server: Any, broadcast: Any, total: Any) -> Any:
        return {
            name: values + np.float32(1e-3 * count()) for name, values in super().step(server, broadcast, total).items()
        }


class Deaf(FedAvg):
    def step(self, server: Any, broadcast: Any, total: Any) -> Any:
        return server


class Wide(FedAvg):
    def train(self, broadcast: Any, chunk: Any, task: Any) -> Any:
        result = super().train(broadcast, chunk, task)
        ledger = replace(result.ledger, uplink_bits=result.ledger.uplink_bits * 0 + 8_000_000)
        return replace(result, ledger=ledger)


class Lossless(FedAvg):
    def train(self, broadcast: Any, chunk: Any, task: Any) -> Any:
        return super().train(broadcast, replace(chunk, lost=None, budget_bits=None), task)


@pytest.mark.parametrize(
    ("algorithm", "law"),
    [
        (Drifting(), "results_do_not_depend_on_who_trains_which_chunk_and_when"),
        (Drifting(), "a_resumed_run_is_the_straight_run"),
        (Drifting(), "a_replica_gives_what_it_gives_alone"),
        (Deaf(), "the_server_learns_and_the_ledger_adds_up"),
        (Deaf(), "another_seed_is_another_run"),
        (Wide(), "nobody_sends_more_than_its_budget"),
        (Wide(), "what_is_known_before_the_training_is_what_comes_of_it"),
        (Lossless(), "a_lost_upload_is_paid_for_and_is_as_if_its_client_had_not_been_there"),
        (Lossless(), "who_cannot_send_changes_nothing_and_keeps_what_its_codec_remembered"),
    ],
)
def test_algorithms(algorithm: Any, law: str) -> None:
    laws = [each for each in (*algorithm_laws.UNCODED, *algorithm_laws.LAWS) if each.__name__ == law]
    case = algorithm_laws.Trained(algorithm, MLP(hidden=(4,)))
    if law == "another_seed_is_another_run":
        case = replace(case, algorithm=Seedless())
    assert list(broken_by(laws, {"": case})) == [law]


class Seedless(Deaf):
    def init(self, task: Any) -> Any:
        return {name: np.zeros_like(values) for name, values in super().init(task).items()}


class Heavy(Cast):
    def max_bytes(self, shapes: Any, rest: Any) -> int:
        return 0


class Loud(Cast):
    def write(self, tensors: Any, key: int, state: Any, rest: Any) -> Any:
        return super().write({name: values + np.float32(1) for name, values in tensors.items()}, key, state, rest)


class Moody(Cast):
    def write(self, tensors: Any, key: int, state: Any, rest: Any) -> Any:
        return super().write({name: values * np.float32(count()) for name, values in tensors.items()}, key, state, rest)


class Naive(Cast):
    def read(self, reader: Any, shapes: Any, key: int, rest: Any) -> Any:
        try:
            return super().read(reader, shapes, key, rest)
        except ValueError as error:
            raise RuntimeError("it crashed") from error


class Flat(Cast):
    def read(self, reader: Any, shapes: Any, key: int, rest: Any) -> Any:
        return {name: values.ravel() for name, values in super().read(reader, shapes, key, rest).items()}


class Growing(Cast):
    def write(self, tensors: Any, key: int, state: Any, rest: Any) -> Any:
        return super().write(tensors, key, state, rest)[0], {"memory": np.zeros(count())}


@pytest.mark.parametrize(
    ("stage", "law"),
    [
        (Heavy(), "wire_bits_are_those_of_the_bytes_and_at_most_max_bits"),
        (Loud(), "zeros_stay_zeros"),
        (Moody(), "one_key_gives_one_message_and_one_state"),
        (Naive(), "hostile_bytes_raise_payload_error"),
        (Flat(), "what_is_sent_decodes_to_finite_tensors_of_the_same_shapes"),
        (Growing(), "the_state_keeps_its_names_and_shapes"),
    ],
)
def test_codec_stages(stage: Any, law: str) -> None:
    assert law in broken_by(codec_laws.LAWS, codec_laws.cases(stage))


def dealt(**changes: Any) -> Any:
    return replace(samples(np.arange(1, N_CLIENTS + 1)), **changes)


@pytest.mark.parametrize(
    ("load", "law"),
    [
        (lambda: dealt(name=f"set {count()}"), "loading_again_gives_the_same_digest"),
        (lambda: dealt(indptr=np.array([0])), "every_client_has_examples_that_are_counted"),
        (lambda: dealt(order=np.zeros(66, dtype=np.int64)), "training_examples_match_their_owners"),
        (lambda: dealt(test=dealt().train, train=dealt().train), "held_out_examples_are_not_trained_on"),
        (lambda: dealt(n_classes=2), "held_out_examples_are_not_trained_on"),
    ],
)
def test_data(load: Any, law: str) -> None:
    class Source:
        def load(self) -> Any:
            return load()

        def __reduce__(self) -> Any:  # a class that is defined in a function is not found by name
            return Loader, (LOADS.index(load),)

    LOADS.append(load)
    loaded = data_laws.Loaded(Source())  # type: ignore[arg-type]
    if law == "held_out_examples_are_not_trained_on" and load().n_classes == 3:
        one = dealt()
        loaded.__dict__["data"] = replace(one, test=one.train)
    assert law in broken_by(data_laws.LAWS, {"": loaded})


LOADS: list[Any] = []


class Loader:
    def __init__(self, place: int) -> None:
        self.load = LOADS[place]


class Unseeded(MLP):
    def init_server(self, data: Any, seed: int) -> Any:
        return super().init_server(data, count())


class Double(MLP):
    def init_server(self, data: Any, seed: int) -> Any:
        return {name: values.astype(np.float64) for name, values in super().init_server(data, seed).items()}


class Missing(MLP):
    def evaluate(self, server: Any, clients: Any, data: Any, split: Any) -> Any:
        return {f"{split}.accuracy": float("nan")}


class Writing(MLP):
    def evaluate(self, server: Any, clients: Any, data: Any, split: Any) -> Any:
        next(iter(server.values()))[...] = 0
        return super().evaluate(server, clients, data, split)


class Lopsided(MLP):
    def init_clients(self, data: Any, seed: int) -> Any:
        return {"own": np.zeros((2, 3))}


@pytest.mark.parametrize(
    ("model", "law"),
    [
        (Unseeded(), "initial_parameters_depend_on_the_seed_alone"),
        (Double(), "parameters_are_finite_float32"),
        (Missing(), "metrics_are_finite_and_the_same_each_time"),
        (Writing(), "evaluating_changes_nothing"),
        (Lopsided(), "private_parameters_have_a_row_for_each_client"),
    ],
)
def test_models(model: Any, law: str) -> None:
    assert law in broken_by(model_laws.LAWS, model_laws.cases(model))


class Restless(LogNormalFleet):
    def profiles(self, examples: Any, seed: int) -> Profiles:
        return super().profiles(examples, count())


class Halved(LogNormalFleet):
    def profiles(self, examples: Any, seed: int) -> Profiles:
        return super().profiles(examples[: len(examples) // 2], seed)


class Stuck(LogNormalFleet):
    def profiles(self, examples: Any, seed: int) -> Profiles:
        profiles = super().profiles(examples, seed)
        return replace(profiles, uplink_bits_per_second=0 * profiles.uplink_bits_per_second)


@pytest.mark.parametrize(
    ("fleet", "law"),
    [
        (Restless(), "profiles_are_the_same_in_every_process"),
        (Halved(), "there_is_a_profile_for_each_client"),
        (Stuck(), "rates_and_speeds_are_finite_and_above_zero"),
    ],
)
def test_fleets(fleet: Any, law: str) -> None:
    assert law in broken_by(simulation_laws.FLEET_LAWS, simulation_laws.fleet_cases(fleet))


class Whimsical(Bernoulli):
    def free(self, n_clients: int, seed: int, round_index: int, seconds: float) -> Any:
        return super().free(n_clients, count(), round_index, seconds)


class Crowded(Bernoulli):
    def free(self, n_clients: int, seed: int, round_index: int, seconds: float) -> Any:
        return super().free(n_clients, seed + n_clients, round_index, seconds)


class Terse(Bernoulli):
    def free(self, n_clients: int, seed: int, round_index: int, seconds: float) -> Any:
        return super().free(n_clients, seed, round_index, seconds)[:1]


@pytest.mark.parametrize(
    ("availability", "law"),
    [
        (Whimsical(), "who_is_there_depends_on_seed_round_and_time_alone"),
        (Crowded(), "a_client_does_not_depend_on_who_else_there_is"),
        (Terse(), "there_is_an_answer_for_each_client"),
    ],
)
def test_availability(availability: Any, law: str) -> None:
    cases = simulation_laws.availability_cases(availability)
    assert law in broken_by(simulation_laws.AVAILABILITY_LAWS, cases)


class Fading(Fixed):
    def draw(self, profiles: Any, seed: int, round_index: int) -> Any:
        links = super().draw(profiles, seed, round_index)
        return replace(links, uplink_bits_per_second=links.uplink_bits_per_second / count())


class Endless(Fixed):
    def draw(self, profiles: Any, seed: int, round_index: int) -> Any:
        links = super().draw(profiles, seed, round_index)
        return replace(links, uplink_bits_per_second=links.uplink_bits_per_second * np.inf)


class Generous(Equal):
    def bits(self, region: Any, seconds: float, lower: Any, weights: Any = None, errors: Any = None) -> Any:
        return 10 * super().bits(region, seconds, lower, weights, errors) + 1


class Fickle(Equal):
    def bits(self, region: Any, seconds: float, lower: Any, weights: Any = None, errors: Any = None) -> Any:
        return super().bits(region, seconds, lower, weights, errors) // count()


class Instant(Unicast):
    def seconds(self, bits: Any, rates: Any, waited_for: Any) -> Any:
        return np.zeros(len(rates))


class Backwards(Unicast):
    def seconds(self, bits: Any, rates: Any, waited_for: Any) -> Any:
        return 1e9 / super().seconds(bits, rates, waited_for)


@pytest.mark.parametrize(
    ("laws", "cases", "law"),
    [
        (radio_laws.CHANNEL_LAWS, radio_laws.channel_cases(Fading()), "links_depend_on_seed_round_and_client_alone"),
        (radio_laws.CHANNEL_LAWS, radio_laws.channel_cases(Endless()), "links_are_rates_of_each_client"),
        (radio_laws.ALLOCATION_LAWS, radio_laws.allocation_cases(Generous()), "bits_are_inside_the_region"),
        (radio_laws.ALLOCATION_LAWS, radio_laws.allocation_cases(Generous()), "who_gets_bits_gets_its_least"),
        (radio_laws.ALLOCATION_LAWS, radio_laws.allocation_cases(Fickle()), "allocating_again_gives_the_same"),
        (radio_laws.DOWNLINK_LAWS, {"": Instant()}, "downloads_take_a_finite_time_of_those_waited_for"),
        (radio_laws.DOWNLINK_LAWS, {"": Backwards()}, "more_bits_take_no_less_time"),
    ],
)
def test_radios(laws: Any, cases: Any, law: str) -> None:
    assert law in broken_by(laws, cases)


class Resetting(Synchronous):
    def close(self, live: Any, opened: Any, results: Any) -> Any:
        outcome = super().close(live, opened, results)
        record = replace(outcome.record, simulated_seconds=-float(count()), round=1)
        return replace(outcome, record=record)


def test_schedules() -> None:
    broken = broken_by(execution_laws.SCHEDULE_LAWS, execution_laws.schedule_cases(Resetting()))
    assert "rounds_are_numbered_and_time_does_not_run_backwards" in broken
    assert "the_results_do_not_depend_on_who_trains" in broken


class Thawed(BaseModel):
    kind: Literal["thawed"] = "thawed"

    def profiles(self, examples: Any, seed: int) -> None:
        """Give no profiles."""


class Locked(LogNormalFleet):
    def __reduce__(self) -> Any:
        raise TypeError("it cannot be pickled")


def test_configurations() -> None:
    broken = broken_by(configuration.LAWS, {"": configuration.Configured(FLEETS, Thawed())})
    assert {
        "an_unknown_field_is_refused",
        "fields_cannot_be_changed",
        "yaml_gives_it_back",
        "pickling_gives_an_equal_object",
        "the_class_says_what_it_is",
    } <= set(broken)
    assert (
        "cannot be pickled"
        in broken_by(configuration.LAWS, {"": configuration.Configured(FLEETS, Locked())})[
            "pickling_gives_an_equal_object"
        ]
    )


class Wandering(RandomSearch):
    def make(self, seed: int, space: Any, objectives: int) -> Any:
        return super().make(seed + count(), space, objectives)


class Hasty(NoPruning):
    def make(self) -> Any:
        return SimpleNamespace(prune=lambda *_: True)


def test_samplers_and_pruners() -> None:
    sampled = broken_by(sampler_laws.SAMPLER_LAWS, sampler_laws.sampler_cases(Wandering()))
    assert "proposals_depend_on_the_seed_the_trial_and_what_had_finished" in sampled
    assert "the_best_trial_is_not_stopped" in broken_by(sampler_laws.PRUNER_LAWS, {"": Hasty()})


def test_trainings_that_fit_nothing_have_no_case() -> None:
    class Refusing(BaseModel):
        model_config = ConfigDict(frozen=True)

        def check(self, task: Any) -> None:
            from narrowcast.platform.errors import UserError

            raise UserError("no")

    assert training_laws.cases(Refusing()) == {}
