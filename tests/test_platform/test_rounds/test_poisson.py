"""Poisson sampling: its rate, rounds without clients, and where it is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from command_line import assert_refused, narrowcast
from digits import digits, make_task
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.experiment import load_experiment
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.fleet import Clock
from narrowcast.platform.rounds.loop import rounds
from narrowcast.platform.rounds.opening import sample_cohort
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.sampling import Poisson
from narrowcast.platform.rounds.state import Run, RunState
from running import local


@pytest.mark.parametrize(("plan", "rate"), [
    (Plan(sampling=Poisson(rate=0.3)), 0.3),
    (Plan(sampling=Poisson(), clients_per_round=5), 0.25),
    (Plan(sampling=Poisson(), clients_per_round=60), 1.0),
])  # fmt: skip
def test_each_client_takes_part_independently_at_the_rate(plan: Plan, rate: float) -> None:
    there = np.zeros((4000, 20))
    for number in range(1, 4001):
        there[number - 1, sample_cohort(plan, np.arange(20), number)] = 1
    deviation = np.sqrt(rate * (1 - rate) / 4000)
    assert (np.abs(there.mean(axis=0) - rate) <= 4 * deviation).all()
    sizes = there.sum(axis=1)
    assert sizes.var() == pytest.approx(20 * rate * (1 - rate), rel=0.1)  # that of a binomial: clients are independent


def test_only_free_clients_are_drawn() -> None:
    free = np.arange(20) % 2 == 0
    plan = Plan(sampling=Poisson(), clients_per_round=10)  # half of all clients, whoever is free
    for number in range(1, 20):
        everyone = sample_cohort(plan, np.arange(20), number)
        assert sample_cohort(plan, np.arange(20), number, free).tolist() == everyone[free[everyone]].tolist()


def play(state: RunState | None = None) -> list[Outcome]:
    task, clock = make_task(digits([12] * 6)), Clock(idle_seconds=7.0)
    plan = Plan(rounds=12, sampling=Poisson(rate=0.15), chunk_size=2, checkpoint_every=1, clock=clock)
    return list(rounds(Run(plan, FedAvg(), task), local(FedAvg(), task), state))


def test_a_round_without_clients_leaves_the_model_and_is_recorded() -> None:
    outcomes = play()
    empty = [outcome for outcome in outcomes if not outcome.record.clients]
    assert 2 < len(empty) < 10
    for outcome in empty:
        record, before = outcome.record, outcomes[outcome.step - 2] if outcome.step > 1 else None
        assert (record.delivered, record.late, record.uplink_bits, record.downlink_bits) == (0, 0, 0, 0)
        assert record.round_simulated_seconds == 7.0
        assert len(outcome.ledger.client) == 0
        if before is not None and outcome.state is not None and before.state is not None:
            assert model_sha256(FedAvg(), outcome.state) == model_sha256(FedAvg(), before.state)
            assert record.simulated_seconds == before.record.simulated_seconds + 7.0
    resumed = play(outcomes[empty[1].step - 1].state)
    assert [repr(outcome.record) for outcome in resumed] == [
        repr(outcome.record) for outcome in outcomes[empty[1].step :]
    ]


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
def test_a_run_with_poisson_sampling_is_verified(tmp_path: Path) -> None:
    settings = ("rounds=5", "sampling=poisson", "sampling.rate=0.05", "data.clients=20", "backend=local")
    quiet = ("tracking.system_metrics=false", "name=few", "--output", tmp_path)
    said = narrowcast("run", "fedavg-digits", *settings, *quiet)
    assert said.status == 0, said.err
    assert narrowcast("verify", "few", "--output", tmp_path).status == 0


def test_a_sampling_without_fields_is_written_by_name() -> None:
    written = [
        load_experiment("fedavg-digits", [f"sampling={kind}"]).plain()["sampling"] for kind in ("uniform", "poisson")
    ]
    assert written == ["uniform", {"kind": "poisson", "rate": None}]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("schedule=buffered",), "sampling = poisson has no number"),
        (("secure=plain",), "secure: sampling = poisson may draw more than clients_per_round"),
        (("replacement=true",), "sampling = poisson repeats no client; use uniform or by_examples"),
        (("sampling.rate=0",), "sampling.rate = 0"),
    ],
)
def test_where_it_is_refused(settings: tuple[str, ...], message: str, tmp_path: Path) -> None:
    words = ("run", "fedavg-digits", "sampling=poisson", *settings, "--output", tmp_path)
    assert_refused(narrowcast(*words), message)
