"""Clients evaluated on their own samples: against a loop over clients, and without any effect on the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.experiment import load_experiment
from narrowcast.laws.small_tasks import sample_sets
from narrowcast.platform.contracts import Executor, Task
from narrowcast.platform.data.dataset import Dataset
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.data.synthetic import Synthetic
from narrowcast.platform.data.text import Shakespeare
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.model import Model
from narrowcast.platform.models.networks import MLP, CharLSTM
from narrowcast.platform.models.neural_network import NeuralNetwork
from narrowcast.platform.rounds.evaluation import (
    client_statistics,
    measure,
    measure_chunk,
    measure_clients,
    model_sha256,
)
from narrowcast.platform.rounds.loop import LocalBackend, LocalExecutor, lockstep, rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import LiveState, Run, start
from narrowcast.platform.tracking.metrics import STATISTICS, lower_is_better, statistics_over_clients
from narrowcast.platform.types import Arrays, Chunk, FloatArray
from narrowcast.tuning.settings import StudySettings
from small_tasks import network_task, rows_task

COUNTS = np.array([3, 0, 9, 1, 14, 5])
SETS = sample_sets(COUNTS)
MODELS: Mapping[str, NeuralNetwork] = {
    "labelled images": MLP(hidden=(6,)),
    "tokens after each position": CharLSTM(hidden=4, layers=1),
    "numbers": MLP(hidden=(6,)),
}
PLAN = Plan(rounds=4, clients_per_round=6, chunk_size=2, evaluate_every=2, checkpoint_every=1)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", MODELS)
def test_each_client_is_evaluated_as_if_its_samples_were_the_test_set(name: str, split: Any) -> None:
    data, model = SETS[name], MODELS[name]
    server, clients = model.init_server(data, 3), np.arange(len(COUNTS))
    shared = {key: values[np.newaxis] for key, values in server.items()}
    own = {key: np.stack([values] * len(COUNTS)) for key, values in server.items()}
    order, indptr = data.of_clients(split)
    for parameters in (shared, own):
        found = model.measure_clients(parameters, {}, data, split, clients)
        for client in clients:
            rows = order[indptr[client] : indptr[client + 1]]
            alone = replace(data, test=getattr(data, split).take(rows))
            expected = model.evaluate(server, {}, alone, "test") or dict.fromkeys(found, np.nan)
            of_client = {metric: values[client] for metric, values in found.items()}
            assert of_client == pytest.approx(expected, rel=1e-6, abs=1e-7, nan_ok=True)


def test_every_user_is_ranked_as_in_the_evaluation_of_all() -> None:
    task = rows_task()
    data = replace(task.data, test=np.where(np.arange(12) == 4, -1, task.data.test))
    model, server, clients = task.model, task.model.init_server(data, 0), task.model.init_clients(data, 0)
    for items in (server["item_factors"][np.newaxis], np.stack([server["item_factors"]] * 12)):
        found = model.measure_clients({"item_factors": items}, clients, data, "test", np.arange(12))
        assert np.flatnonzero(np.isnan(found["hr@10"])).tolist() == [4]
        expected = model.evaluate(server, clients, data, "test")
        assert {name: np.nanmean(values) for name, values in found.items()} == pytest.approx(expected)
    scores = server["item_factors"] @ clients["user_factors"].T
    for user in (0, 11):
        rank = (scores[data.negatives[user], user] >= scores[data.test[user], user]).sum()
        assert found["ndcg@10"][user] == pytest.approx(1 / np.log2(rank + 2) if rank < 10 else 0)


def q_ffl(accuracies: FloatArray) -> dict[str, float]:
    """The statistics as the code of q-FFL computes them (plot_fairness.py of litian96/fair_flearn)."""
    tenth = int(len(accuracies) * 0.1)
    return {
        "worst_10_percent": np.mean(np.sort(accuracies)[:tenth]),
        "best_10_percent": np.mean(np.sort(accuracies)[len(accuracies) - tenth :]),
        "variance": np.var(accuracies) * 10000,
    }


@pytest.mark.parametrize("n", [10, 37, 70, 200])
def test_the_statistics_are_those_of_q_ffl(n: int) -> None:
    values = np.random.default_rng(n).random(n)
    found = statistics_over_clients(np.append(values, np.nan), lower_is_better=False, share=True)
    assert {name: found[name] for name in q_ffl(values)} == pytest.approx(q_ffl(values))
    differences = np.abs(values[:, None] - values).mean()
    assert found["gini"] == pytest.approx(differences / (2 * values.mean()))
    assert (found["mean"], found["clients"]) == (pytest.approx(values.mean()), n)


def test_the_worst_loss_is_the_highest_and_few_clients_have_a_worst_one() -> None:
    found = statistics_over_clients(np.array([1.0, 3.0, 2.0]), lower_is_better=True, share=False)
    assert (found["worst_10_percent"], found["best_10_percent"], found["variance"]) == (3, 1, pytest.approx(2 / 3))
    assert np.isnan(statistics_over_clients(np.array([-1.0, 2.0]), lower_is_better=False, share=False)["gini"])
    assert statistics_over_clients(np.zeros(3), lower_is_better=False, share=True)["gini"] == 0
    nobody = statistics_over_clients(np.full(3, np.nan), lower_is_better=False, share=True)
    assert nobody.pop("clients") == 0
    assert np.isnan(list(nobody.values())).all()


def test_held_out_samples_are_dealt_as_the_training_samples() -> None:
    data = load_experiment("fedavg-digits", ["data={kind: digits, clients: 8, partition: {kind: shards}}"]).data.load()
    order, indptr = data.of_clients("test")
    assert np.sort(order).tolist() == list(range(len(data.test)))
    owners = np.repeat(np.arange(8), np.diff(indptr))
    train_owners = np.repeat(np.arange(8), data.examples)
    for label in range(10):
        held = np.bincount(owners[data.test.labels[order] == label], minlength=8)
        trained = np.bincount(train_owners[data.train.labels[data.order] == label], minlength=8)
        assert np.abs(held - held.sum() * trained / trained.sum()).max() < 1
    again = replace(data).of_clients("test")
    assert (again.order == order).all()
    assert (replace(data, seed=1).of_clients("test").order != order).any()


def test_rounding_is_made_up_for_in_the_classes_that_follow() -> None:
    data = load_experiment("fedavg-digits", ["data.partition=dirichlet", "data.partition.alpha=0.2"]).data.load()
    owners = np.repeat(np.arange(200), data.examples)
    trained = [np.bincount(owners[data.train.labels[data.order] == each], minlength=200) for each in range(10)]
    held = np.bincount(data.test.labels, minlength=10)
    expected = sum(n * counts / counts.sum() for n, counts in zip(held, trained, strict=True))
    assert np.abs(data.examples_of("test") - expected).max() < 1


def test_a_class_that_nobody_trains_on_belongs_to_nobody() -> None:
    task = network_task()
    labels = task.data.test.labels.copy()
    labels[:5] = 2
    kept = task.data.order[task.data.train.labels[task.data.order] != 2]
    data = replace(task.data, test=replace(task.data.test, labels=labels), order=kept, indptr=np.array([0, len(kept)]))
    assert sorted(data.of_clients("test").order) == np.flatnonzero(labels != 2).tolist()


def test_users_are_evaluated_on_what_is_their_own() -> None:
    data = Synthetic(clients=5, validation_share=0.2, seed=2).load()
    everything = Synthetic(clients=5, validation_share=0, seed=2).load()
    for user in range(5):
        rows, _ = data.of_clients("test").rows(np.array([user]))
        last = everything.of_clients("test").rows(np.array([user]))[0]
        assert (data.test.features[rows] == everything.test.features[last]).all()
        trained = everything.train.features[everything.of_clients("train").rows(np.array([user]))[0]]
        held, _ = data.of_clients("validation").rows(np.array([user]))
        assert (data.validation.features[held][:, None] == trained).all(2).any(1).all()
    assert sum(data.examples_of("validation")) == len(data.validation)


def outcomes(run: Run) -> list[Outcome]:
    return list(LocalBackend().run(run, start(run)))


@pytest.mark.parametrize("make", [rows_task, network_task], ids=["rows", "network"])
def test_it_changes_nothing_of_the_run(make: Any) -> None:
    task = make()
    plain = outcomes(Run(PLAN, FedAvg(), task))
    asked = outcomes(Run(PLAN.model_copy(update={"evaluate_clients": ("test",)}), FedAvg(), task))
    for one, other in zip(plain, asked, strict=True):
        assert one.record == other.record or np.isnan(one.record.loss)
        assert {name: other.metrics[name] for name in one.metrics} == one.metrics
        assert (one.state is None) == (other.state is None)
        if one.state and other.state:
            assert model_sha256(FedAvg(), one.state) == model_sha256(FedAvg(), other.state)
    assert [bool(each.client_metrics) for each in asked] == [False, True, False, True]
    assert all(len(values) == 12 for values in asked[-1].client_metrics.values())
    assert asked[-1].timing.evaluate > 0


def test_chunks_executors_and_lockstep_give_the_same_figures() -> None:
    plan = PLAN.model_copy(update={"evaluate_clients": ("test", "train")})
    run = Run(plan, FedAvg(), network_task())
    alone = outcomes(run)[-1]
    other = Run(plan.model_copy(update={"seed": 1}), FedAvg(), run.task)
    together = [each[0] for each in lockstep([run, other])][-1]

    class TrainsOnly(Executor):
        train = LocalExecutor(run).train  # type: ignore[assignment]

    elsewhere = list(rounds(run, TrainsOnly()))[-1]
    assert alone.state is not None
    for metrics in (together.metrics, elsewhere.metrics, measure(run, alone.state)):
        assert metrics == pytest.approx(alone.metrics, rel=0, abs=0)


class ShiftedFedAvg(FedAvg):
    """FedAvg whose clients would add their number to the last bias."""

    def personal(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Arrays:
        shift = chunk.clients[:, np.newaxis] * np.eye(3)[0]
        own = {name: np.stack([values] * len(chunk.clients)) for name, values in broadcast.items()}
        last = list(own)[-1]
        return {**own, last: (own[last] + shift).astype(np.float32)}


def test_an_algorithm_may_say_what_each_client_would_use() -> None:
    task = network_task()
    plan = PLAN.model_copy(update={"evaluate_clients": ("test",)})
    algorithm = ShiftedFedAvg()
    run = Run(plan, algorithm, task)
    state = start(run)
    found = measure_clients(LiveState.of(run, state))
    model, data = task.model, task.data
    for client in range(12):
        parameters = algorithm.personal(dict(state.server), Chunk(1, 0, np.array([client]), {}), task)
        rows, counts = data.of_clients("test").rows(np.array([client]))
        alone = replace(data, test=data.test.take(rows))
        expected = model.evaluate({name: values[0] for name, values in parameters.items()}, {}, alone, "test")
        if counts[0]:
            assert found["test.loss"][client] == pytest.approx(expected["loss"], rel=1e-6)
    one = measure_chunk(run, dict(state.server), Chunk(1, 0, np.array([0]), {}), ("test",))
    assert one.metrics["test.loss"][0] == found["test.loss"][0]


def test_names_are_split_metric_statistic() -> None:
    run = Run(PLAN.model_copy(update={"evaluate_clients": ("test",)}), FedAvg(), network_task())
    metrics = client_statistics(run, measure_clients(LiveState.of(run, start(run))))
    shown = {f"test.{metric}" for metric in ("accuracy", "loss")}
    statistics = ("mean", "worst_10_percent", "best_10_percent", "variance", "gini", "clients")
    assert metrics.keys() == {f"{name}.{statistic}" for name in shown for statistic in statistics}
    assert metrics["test.loss.worst_10_percent"] >= metrics["test.loss.mean"] >= metrics["test.loss.best_10_percent"]


@dataclass(frozen=True)
class Elsewhere(Dataset):
    name: str = "elsewhere"


class Unmeasured(Model):
    kind = "unmeasured"
    check = init_server = init_clients = evaluate = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("splits", "change", "said"),
    [
        (("validation",), lambda task: task, "no client of tiny has validation samples; raise data.validation_share"),
        (("train",), lambda _: rows_task(), "tiny ranks held-out items alone; evaluate clients on validation or test"),
        (("test",), lambda task: replace(task, data=Elsewhere()), "elsewhere does not say which samples are whose"),
        (("test",), lambda task: replace(task, model=Unmeasured()), "has no measure_clients"),
    ],
)
def test_what_cannot_be_evaluated_is_said(splits: Any, change: Any, said: str) -> None:
    from narrowcast.platform.rounds.state import check_client_evaluation

    task = change(network_task())
    with pytest.raises(UserError, match="evaluate_clients = ") as error:
        check_client_evaluation(splits, task)
    assert said in str(error.value)


def test_a_run_is_refused_before_anything_is_written() -> None:
    experiment = load_experiment("fedavg-digits", ["data.validation_share=0", "evaluate_clients=validation"])
    with pytest.raises(UserError, match="no client of digits has validation samples"):
        experiment.task(experiment.data_source.load())


def test_one_split_may_be_given_without_brackets() -> None:
    given = [load_experiment("fedavg-digits", [f"evaluate_clients={each}"]) for each in ("test", "[test,test]", "null")]
    assert [each.evaluate_clients for each in given] == [("test",), ("test",), ()]
    assert given[0].digest() == given[2].digest()
    with pytest.raises(UserError, match="evaluate_clients"):
        load_experiment("fedavg-digits", ["evaluate_clients=all"])


def test_shakespeare_knows_the_users_of_its_windows() -> None:
    data: Samples = Shakespeare(clients=3, stride=64).load()
    for split in ("validation", "test"):
        assert data.examples_of(split).sum() == len(getattr(data, split))  # type: ignore[arg-type]
        assert (data.held_out_users[split][data.of_clients(split).order] == np.sort(data.held_out_users[split])).all()  # type: ignore[arg-type]


def test_a_spread_is_better_when_lower_and_other_statistics_as_their_metric() -> None:
    declared = frozenset(("loss",))
    lower = {
        name: lower_is_better(name, declared)
        for metric in ("validation.accuracy", "validation.loss")
        for name in (metric, *(f"{metric}.{each}" for each in ("mean", "worst_10_percent", "variance", "gini")))
    }
    assert [name for name, each in lower.items() if not each] == [
        "validation.accuracy",
        "validation.accuracy.mean",
        "validation.accuracy.worst_10_percent",
    ]
    assert lower_is_better("test.rmse.worst_10_percent")
    assert not lower_is_better("test.variance", declared)  # a metric of that name, not a statistic


def test_studies_may_have_them_as_objectives() -> None:
    names = [f"validation.accuracy.{statistic}" for statistic in STATISTICS]
    worst = StudySettings(objectives={"validation.accuracy.worst_10_percent": "maximize"})
    rest = (names, ("uplink_bits",), frozenset(("loss",)))
    worst.check_measured("experiment", names, *rest)
    variance = StudySettings(objectives={"validation.accuracy.variance": "maximize"})
    with pytest.raises(UserError, match="it is better when lower; write minimize"):
        variance.check_measured("experiment", names, *rest)
    with pytest.raises(UserError, match="no run of this experiment reports it"):
        worst.check_measured("experiment", ["validation.accuracy"], ["validation.accuracy"], ("uplink_bits",))
