"""Clients that never take part: who they are, that they change nothing, and what they use, against plain loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.evaluation import client_statistics, measure_clients, model_sha256
from narrowcast.platform.rounds.loop import LocalExecutor, rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.sampling import drawn_new_clients
from narrowcast.platform.rounds.state import LiveState, Run

CLIENTS, NEW, EPOCHS, RATE = 13, 4, 3, 0.2
SETTINGS: dict[str, Any] = {
    **{"data": {"kind": "digits", "clients": CLIENTS, "partition": {"kind": "dirichlet", "alpha": 1.0}}},
    **{"model": {"kind": "mlp", "hidden": [8]}, "rounds": 3, "clients_per_round": 5, "chunk_size": 3},
    # one batch has all samples, so that no order of them is drawn
    **{"training": {"epochs": EPOCHS, "batch_size": 10_000, "learning_rate": RATE}},
    **{"evaluate_clients": ["test"], "evaluate_every": 3, "new_clients": NEW},
}
Values = Mapping[str, Tensor]


def experiment(algorithm: Any, **more: Any) -> Experiment:
    return load_experiment({"name": "joined", **SETTINGS, "algorithm": algorithm, **more})


@cache
def digits() -> Samples:
    data: Samples = experiment("fedavg").data_source.load()
    return data


def finished(of: Experiment, data: Samples | None = None) -> tuple[Run, list[Outcome]]:
    run = Run(of, of.secured_algorithm, of.task(digits() if data is None else data))
    return run, list(rounds(run, LocalExecutor(run)))


class Client:
    """Full-batch gradient descent on the training samples of one client, by torch alone."""

    def __init__(self, run: Run, client: int) -> None:
        self.module: nn.Module = run.task.model.module(run.task.data)
        data: Any = run.task.data
        self.train, self.test = (
            [torch.from_numpy(values[data.of_clients(split).rows(np.array([client]))[0]]) for values in pair]
            for split, pair in (
                ("train", (data.train.features, data.train.labels)),
                ("test", (data.test.features, data.test.labels)),
            )
        )

    def gradient(self, values: Values) -> Values:
        held = {name: tensor.detach().clone().requires_grad_() for name, tensor in values.items()}
        loss = cross_entropy(functional_call(self.module, held, (self.train[0],)), self.train[1])
        return dict(zip(held, torch.autograd.grad(loss, list(held.values())), strict=True))

    def descended(self, values: Values, steps: int = EPOCHS, rate: float = RATE) -> Values:
        for _ in range(steps):
            descent = self.gradient(values)
            values = {name: tensor - rate * descent[name] for name, tensor in values.items()}
        return values

    def loss_and_accuracy(self, values: Values) -> tuple[float, float]:
        scores = functional_call(self.module, dict(values), (self.test[0],))
        return float(cross_entropy(scores, self.test[1])), float((scores.argmax(1) == self.test[1]).double().mean())


def mixed(own: Values, shared: Values, alpha: float) -> Values:
    return {name: alpha * tensor + (1 - alpha) * shared[name] for name, tensor in own.items()}


def ditto(client: Client, x: Values, start: Values) -> Values:
    del start
    v = x
    for _ in range(EPOCHS):
        descent = client.gradient(v)
        v = {name: tensor - RATE * (descent[name] + 0.5 * (tensor - x[name])) for name, tensor in v.items()}
    return v


def apfl(client: Client, x: Values, start: Values) -> Values:
    del start
    y = v = x
    for _ in range(EPOCHS):
        of_mixture, of_y = client.gradient(mixed(v, y, 0.3)), client.gradient(y)
        v = {name: tensor - 0.3 * RATE * of_mixture[name] for name, tensor in v.items()}
        y = {name: tensor - RATE * of_y[name] for name, tensor in y.items()}
    return mixed(v, x, 0.3)


def fedper(client: Client, x: Values, start: Values) -> Values:
    head = [name for name in x if name.rpartition(".")[0] == list(x)[-1].rpartition(".")[0]]
    trained = client.descended({name: start[name] if name in head else tensor for name, tensor in x.items()})
    return {name: trained[name] if name in head else tensor for name, tensor in x.items()}


def pfedme(client: Client, x: Values, start: Values) -> Values:
    del start
    y = theta = x
    for _ in range(EPOCHS):
        for _ in range(2):
            descent = client.gradient(theta)
            theta = {name: t - 0.1 * (descent[name] + 2.0 * (t - y[name])) for name, t in theta.items()}
        y = {name: tensor - RATE * 2.0 * (tensor - theta[name]) for name, tensor in y.items()}
    return theta


Adapted = Callable[[Client, Values, Values], Values]
METHODS: dict[str, tuple[dict[str, Any], Adapted]] = {
    "fedavg": ({}, lambda _client, x, _start: x),
    "local": ({}, lambda client, _x, start: client.descended(start)),
    "fine_tune": (
        {"fine_tune_epochs": 2, "fine_tune_rate": 0.05},
        lambda client, x, _start: client.descended(x, 2, 0.05),
    ),
    "per_fedavg": ({"alpha": 0.05, "batches": "same"}, lambda client, x, _start: client.descended(x, 1, 0.05)),
    "ditto": ({"pull": 0.5}, ditto),
    "apfl": ({"alpha": 0.3}, apfl),
    "partial": ({"kept": "head"}, fedper),
    "pfedme": ({"pull": 2.0, "personal_rate": 0.1, "inner_steps": 2}, pfedme),
}


@pytest.mark.parametrize("kind", METHODS)
def test_a_new_client_adapts_from_the_global_model_and_is_measured(kind: str) -> None:
    settings, adapted = METHODS[kind]
    run, outcomes = finished(experiment({"kind": kind, **settings}))
    last = outcomes[-1]
    assert last.state is not None
    as_tensors = lambda arrays: {name: torch.from_numpy(np.array(values)) for name, values in arrays.items()}  # noqa: E731
    x, start = as_tensors(run.algorithm.final(last.state.server)), as_tensors(run.task.initial_parameters())
    own, new = (last.client_metrics[name] for name in ("test.loss", "new.test.loss"))
    joined = np.flatnonzero(~np.isnan(new))
    assert len(joined) == NEW
    assert np.isnan(own[joined]).all()
    for number in joined.tolist():
        client = Client(run, number)
        loss, accuracy = client.loss_and_accuracy(adapted(client, x, start))
        assert new[number] == pytest.approx(loss, rel=2e-4)
        assert last.client_metrics["new.test.accuracy"][number] == pytest.approx(accuracy)
    statistics = {name: last.metrics[f"new.test.accuracy.{name}"] for name in ("mean", "worst_10_percent", "clients")}
    of_new = last.client_metrics["new.test.accuracy"][joined]
    assert statistics == pytest.approx({"mean": of_new.mean(), "worst_10_percent": of_new.min(), "clients": NEW})


def test_the_share_of_clients_that_their_own_models_serve_better() -> None:
    run, outcomes = finished(experiment("ditto"))
    last = outcomes[-1]
    with_global, own = last.client_metrics["global.test.accuracy"], last.client_metrics["test.accuracy"]
    for name, values in (("test.accuracy", own), ("new.test.accuracy", last.client_metrics["new.test.accuracy"])):
        pairs = [(a, b) for a, b in zip(values, with_global, strict=True) if not np.isnan(a)]
        assert last.metrics[f"{name}.better_than_global"] == sum(a > b for a, b in pairs) / len(pairs)
    loss, of_global = (last.client_metrics[f"{prefix}test.loss"] for prefix in ("", "global."))
    pairs = [(a, b) for a, b in zip(loss, of_global, strict=True) if not np.isnan(a)]
    assert last.metrics["test.loss.better_than_global"] == sum(a < b for a, b in pairs) / len(pairs)
    assert last.state is not None
    x = {name: torch.from_numpy(values) for name, values in run.algorithm.final(last.state.server).items()}
    for number in range(CLIENTS):
        assert of_global[number] == pytest.approx(Client(run, number).loss_and_accuracy(x)[0], rel=1e-5)
    assert not any(name.startswith("global.") for name in finished(experiment("fedavg"))[1][-1].metrics)


DRAWS: dict[str, dict[str, Any]] = {
    "rotation": {},
    "uniform, some of them free": {"sampling": "uniform", "availability": {"kind": "bernoulli", "probability": 0.7}},
    "each by itself": {"sampling": "poisson"},
    "with replacement": {"sampling": "by_examples", "replacement": True, "algorithm": "fedavg"},
    "buffered": {"schedule": {"kind": "buffered", "buffer_size": 3}, "algorithm": "fedavg"},
    "all": {"clients_per_round": CLIENTS},
}


@pytest.mark.parametrize("draw", DRAWS)
def test_samples_of_new_clients_change_no_parameter(draw: str) -> None:
    asked = experiment(**{"algorithm": {"kind": "ditto", "pull": 0.5}, "rounds": 4, **DRAWS[draw]})
    run, outcomes = finished(asked)
    new = run.new_clients
    assert new is not None
    assert not set(np.flatnonzero(new)) & {client for outcome in outcomes for client in outcome.ledger.client.tolist()}
    rows, _ = digits().of_clients("train").rows(np.flatnonzero(new))
    labels = digits().train.labels.copy()
    labels[rows] = (labels[rows] + 1) % 10
    other = replace(digits(), train=Labelled(digits().train.features, labels))
    states = [of[-1].state for _, of in ((run, outcomes), finished(asked, other))]
    assert states[0] is not None
    assert states[1] is not None
    assert model_sha256(run.algorithm, states[0]) == model_sha256(run.algorithm, states[1])


def test_new_clients_train_in_one_chunk_or_several_alike() -> None:
    run, outcomes = finished(experiment("ditto"))
    state = outcomes[-1].state
    assert state is not None
    live = LiveState.of(run, state)
    one_by_one = LiveState.of(replace(run, plan=run.plan.model_copy(update={"chunk_size": 1})), state)
    together, apart = measure_clients(live), measure_clients(one_by_one)
    assert together.keys() == apart.keys()
    for name, values in together.items():
        np.testing.assert_allclose(values, apart[name], rtol=1e-4, equal_nan=True)
    for name, value in client_statistics(run, together).items():
        assert outcomes[-1].metrics[name] == pytest.approx(value, nan_ok=True)


def test_the_draw_is_of_the_public_seed() -> None:
    counts = [int(drawn_new_clients(asked, 50, 3).sum()) for asked in (10, 0.2, 0.5, 1)]  # type: ignore[union-attr]
    assert counts == [10, 10, 25, 1]
    first, again, other = (drawn_new_clients(0.3, 50, seed) for seed in (3, 3, 4))
    assert np.array_equal(first, again)  # type: ignore[arg-type]
    assert not np.array_equal(first, other)  # type: ignore[arg-type]
    assert drawn_new_clients(0, 50, 3) is None


def test_runs_without_new_clients_are_those_of_versions_without_them() -> None:
    assert not [name for name in experiment("ditto", new_clients=0).identity() if "new_clients" in name]
    assert experiment("ditto").identity()["new_clients"] == NEW
    assert experiment("ditto", new_clients=0.25).plain()["new_clients"] == 0.25


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"new_clients": CLIENTS},
            "leaves 13 to be new and 0 to train; give a number or share that leaves some of both",
        ),
        ({"new_clients": 0.01}, "leaves 0 to be new and 13 to train"),
        ({"new_clients": 1.5}, "new_clients"),
        ({"new_clients": -1}, "new_clients"),
        ({"evaluate_clients": []}, "new clients are measured alone; set evaluate_clients = test"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        experiment("fedavg", **settings).task(digits())
    assert "\n" not in str(refused.value)


def test_factors_of_new_clients_are_nobodys() -> None:
    users = load_experiment("scolr-ml100k", ["new_clients=5", "evaluate_clients=test"])
    with pytest.raises(UserError, match="the user_factors of clients that never take part are not trained"):
        users.task(users.data_source.load())
