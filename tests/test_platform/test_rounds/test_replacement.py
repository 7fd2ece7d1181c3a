"""Sampling with replacement: probabilities, weights, runs of it, and where it is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from narrowcast.algorithms.federated.fairness import QFFL
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.fednova import FedNova
from narrowcast.algorithms.federated.fedprox import FedProx
from narrowcast.experiment import load_experiment
from narrowcast.laws.small_tasks import N_CLIENTS, stepped, task_of, train_everyone
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.rounds.opening import sample_cohort
from narrowcast.platform.rounds.plan import Plan
from running import play, sha256
from small_tasks import network_task

DRAWS = np.arange(N_CLIENTS) % 3 + 1
COUNTED = [FedAvg(), FedProx(mu=0.1), FedNova(weights="equal"), QFFL(q=2)]
DIGITS = ("fedavg-digits", "rounds=2", "replacement=true")


@pytest.mark.parametrize("sampling", ["uniform", "by_examples"])
def test_every_draw_has_the_same_probabilities(sampling: Any) -> None:
    plan = Plan(sampling=sampling, clients_per_round=4, replacement=True)
    examples, order = np.array([0, 1, 1, 2, 4]), np.arange(5)
    draws = np.array([sample_cohort(plan, order, each, None, examples) for each in range(1, 4001)])
    wanted = np.full(5, 0.2) if sampling == "uniform" else examples / 8
    for place in range(4):
        assert np.abs(np.bincount(draws[:, place], minlength=5) / 4000 - wanted).max() < 0.035
    one_free = np.array([False, False, False, True, False])
    assert sample_cohort(plan, order, 1, one_free, examples).tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("weights", ["equal", "examples"])
def test_a_client_drawn_k_times_has_k_times_its_weight(weights: Any) -> None:
    task, algorithm = task_of(MLP(hidden=(8,))), FedAvg(weights=weights)
    got = stepped(algorithm, task, train_everyone(algorithm, task, draws=DRAWS))
    alone = [stepped(algorithm, task, train_everyone(algorithm, task, [client])) for client in range(N_CLIENTS)]
    counted = DRAWS * (task.data.examples if weights == "examples" else 1)
    for name, values in got.items():
        wanted = np.average([model[name] for model in alone], axis=0, weights=counted)
        assert np.allclose(values, wanted, atol=1e-6)


@pytest.mark.parametrize("algorithm", COUNTED, ids=lambda each: each.kind)
def test_the_same_number_of_draws_for_all_is_one(algorithm: Any) -> None:
    task = task_of(MLP(hidden=(8,)))
    thrice, once = (
        stepped(algorithm, task, train_everyone(algorithm, task, draws=np.full(N_CLIENTS, each))) for each in (3, 1)
    )
    without = stepped(algorithm, task, train_everyone(algorithm, task))
    for name in without:
        assert np.array_equal(once[name], without[name])
        assert np.allclose(thrice[name], without[name], atol=1e-6)


def test_chunks_carry_the_draws_and_a_run_ends_with_the_same_model() -> None:
    plan = Plan(rounds=6, clients_per_round=8, chunk_size=3, sampling="by_examples", replacement=True)
    first, again, other = (
        play(each, FedAvg(), network_task()) for each in (plan, plan, plan.model_copy(update={"replacement": False}))
    )
    assert any(outcome.record.clients < 8 for outcome in first)
    assert sha256(FedAvg(), first) == sha256(FedAvg(), again) != sha256(FedAvg(), other)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "sampling = round_robin repeats no client; use uniform or by_examples"),
        (("sampling=uniform", "over_selection=1.5"), "draws with replacement are undefined"),
        (("sampling=uniform", "schedule=buffered"), "deadline_seconds and replacement"),
        (("sampling=uniform", "algorithm=feddyn"), "replacement = true: feddyn as set here counts every client once"),
        (("sampling=uniform", "algorithm={kind: fedavg, aggregator: krum}"), "fedavg as set here counts every client"),
        (("sampling=uniform", "algorithm=scolr"), "scolr as set here counts every client once"),
        (("sampling=uniform", "secure=plain"), "as set here counts every client once"),
    ],
)
def test_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        experiment = load_experiment(DIGITS[0], [*DIGITS[1:], *overrides])
        experiment.task(experiment.data_source.load())
