"""Local steps of an algorithm's own, batched over clients: two published rules against plain loops over clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from digits import digits, make_task, relative_error
from narrowcast.algorithms.local_training.batches import draw_schedule
from narrowcast.platform.compiled import one_thread
from narrowcast.platform.contracts import LocalCall, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import CNN, MLP, Softmax
from narrowcast.platform.types import Arrays, Chunk, FloatArray, Gradient, LocalTerms, LocalUpdates
from per_client import make_task as make_factorisation
from per_client import synthetic

COUNTS = [21, 8, 40, 3, 17, 8, 0, 30]
EVERYONE = np.arange(len(COUNTS))
Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Descent:
    """y -= rate g(y), as without a rule."""

    parts: int = 1

    def init(self, start: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Parameters:
        return {}

    def step(self, values: Any, slots: Any, gradient: Gradient, own: Any, rate: float, step: int) -> None:
        for name, each in gradient(values, 0).items():
            values[name].sub_(each, alpha=rate)


@dataclass(frozen=True)
class FirstOrderPerFedAvg:
    """y' = y - inner g(y; B1), then y -= rate g(y'; B2): Fallah et al., NeurIPS 2020, without the Hessian."""

    inner: float
    parts: int = 2

    def init(self, start: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Parameters:
        return {}

    def step(self, values: Any, slots: Any, gradient: Gradient, own: Any, rate: float, step: int) -> None:
        adapted = {name: values[name] - self.inner * each for name, each in gradient(values, 0).items()}
        for name, each in gradient(adapted, 1).items():
            values[name].sub_(each, alpha=rate)


@dataclass(frozen=True)
class APFL:
    """y -= rate g(y); v -= rate alpha g(alpha v + (1 - alpha) y): Deng et al., 2020 (arXiv:2003.13461), Algorithm 1."""

    parts: int = 1

    def init(self, start: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Parameters:
        return {name: own[name].clone() for name in start}

    def step(self, values: Any, slots: Any, gradient: Gradient, own: Any, rate: float, step: int) -> None:
        for name, each in gradient(values, 0).items():
            values[name].sub_(each, alpha=rate)
        alpha = {name: own["alpha"].view(-1, *[1] * (each.ndim - 1)) for name, each in values.items()}
        mixed = {name: alpha[name] * slots[name] + (1 - alpha[name]) * values[name] for name in values}
        for name, each in gradient(mixed, 0).items():
            slots[name].sub_(alpha[name] * each, alpha=rate)


@dataclass(frozen=True)
class Curved:
    """y -= rate H(y) g(y)."""

    parts: int = 1

    def init(self, start: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Parameters:
        return {}

    def step(self, values: Any, slots: Any, gradient: Gradient, own: Any, rate: float, step: int) -> None:
        for name, each in gradient.hessian_product(values, 0, gradient(values, 0)).items():
            values[name].sub_(each, alpha=rate)


def train(task: Task, server: Arrays, clients: Any = EVERYONE, **terms: Any) -> LocalUpdates:
    updates: LocalUpdates = task.training.train(server, Chunk(1, 0, np.array(clients), {}), task, LocalTerms(**terms))
    return updates


class Plain:
    """One client of round 1, its batches, and the gradient of a module at any parameters by torch's autograd."""

    def __init__(self, task: Task, client: int) -> None:
        self.task, data, one = task, task.data, np.array([client])
        keys = task.private_seed.stream_keys("shuffle", 1, one)
        training = task.training
        schedule = draw_schedule(data.examples[one], np.array([training.epochs]), training.batch_size, keys)
        own = data.order[data.indptr[client] : data.indptr[client + 1]]
        taken = zip(schedule.samples, schedule.sizes, strict=True)
        self.batches = [data.train.take(own[batch[:size]]) for batch, size in taken]
        self.module = task.model.module(data)

    def gradient(self, at: Parameters, batch: Any, rows: slice = slice(None)) -> Parameters:
        at = {name: each.clone().requires_grad_() for name, each in at.items()}
        features = torch.from_numpy(batch.features[rows]).to(next(iter(at.values())).dtype)
        labels = torch.from_numpy(batch.labels[rows])
        if not len(labels):
            return {name: torch.zeros_like(each) for name, each in at.items()}
        loss = nn.functional.cross_entropy(torch.func.functional_call(self.module, at, (features,)), labels)
        return dict(zip(at, torch.autograd.grad(loss, list(at.values())), strict=True))


def tensors(arrays: Arrays) -> Parameters:
    return {name: torch.from_numpy(np.array(values)) for name, values in arrays.items()}


def changed(after: Parameters, before: Arrays) -> Arrays:
    return {name: each.numpy() - before[name] for name, each in after.items()}


@pytest.mark.parametrize("execution", ["batched", "per_client"])
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.05, "clip_norm": 0.3}], ids=["plain", "terms"])
def test_a_rule_that_descends_is_the_training_without_one(execution: str, settings: dict[str, Any]) -> None:
    task = make_task(digits(COUNTS), MLP(hidden=(16,)), epochs=2, execution=execution, **settings)
    server = task.model.init_server(task.data, 0)
    correction = {name: np.full((8, *values.shape), 0.01, np.float32) for name, values in server.items()}
    terms: dict[str, Any] = {"proximal": 0.2, "correction": correction}
    plain, ruled = train(task, server, **terms), train(task, server, rule=Descent(), **terms)
    assert relative_error(ruled.changes, plain.changes) <= 2e-6
    assert np.allclose(ruled.loss, plain.loss, rtol=1e-6)
    assert ruled.steps.tolist() == plain.steps.tolist()


@pytest.mark.parametrize("execution", ["batched", "per_client"])
def test_a_rule_in_float64_is_computed_in_it(execution: str) -> None:
    task = make_task(digits(COUNTS), MLP(hidden=(16,), dtype="float64"), epochs=2, execution=execution)
    server = task.model.init_server(task.data, 0)
    plain, ruled = train(task, server), train(task, server, rule=Descent())
    assert relative_error(ruled.changes, plain.changes) <= 1e-12
    assert np.allclose(ruled.loss, plain.loss, rtol=1e-12)
    assert all(each.dtype == np.float64 for each in ruled.changes.values())


@pytest.mark.parametrize("execution", ["batched", "per_client"])
def test_first_order_per_fedavg_is_a_rule(execution: str) -> None:
    task = make_task(digits(COUNTS), MLP(hidden=(16,)), epochs=2, execution=execution)
    server = task.model.init_server(task.data, 0)
    updates = train(task, server, rule=FirstOrderPerFedAvg(inner=0.3))
    for client in np.flatnonzero(COUNTS):
        plain, values = Plain(task, client), tensors(server)
        for batch in plain.batches:
            half = -(-len(batch) // 2)
            first = plain.gradient(values, batch, slice(0, half))
            second = plain.gradient(
                {name: values[name] - 0.3 * first[name] for name in values}, batch, slice(half, None)
            )
            values = {name: values[name] - 0.1 * second[name] for name in values}
        got = {name: each[client] for name, each in updates.changes.items()}
        assert relative_error(got, changed(values, server)) <= 2e-5


@pytest.mark.parametrize("execution", ["batched", "per_client"])
@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("model", [MLP(hidden=(16,)), CNN(channels=(2, 3), hidden=5)], ids=["chain", "convolutions"])
def test_the_product_with_the_hessian_is_the_slope_of_the_gradient(model: Any, decay: float, execution: str) -> None:
    task = make_task(
        digits(COUNTS, images=model.kind == "cnn"), model, execution=execution, weight_decay=decay, batch_size=64
    )
    server = task.model.init_server(task.data, 0)
    updates = train(task, server, rule=Curved(), proximal=0.2)
    for client in np.flatnonzero(COUNTS)[:3]:
        plain, start = Plain(task, client), {name: each.double() for name, each in tensors(server).items()}
        d = {name: g + decay * start[name] for name, g in plain.gradient(start, plain.batches[0]).items()}
        sides = [
            plain.gradient({name: start[name] + step * d[name] for name in d}, plain.batches[0])
            for step in (1e-5, -1e-5)
        ]
        moved = {name: ((sides[0][name] - sides[1][name]) / 2e-5 + (decay + 0.2) * d[name]) * -0.1 for name in d}
        got = {name: each[client] for name, each in updates.changes.items()}
        assert relative_error(got, {name: each.numpy() for name, each in moved.items()}) <= 1e-4


def personal(task: Task, alpha: FloatArray) -> Arrays:
    """v of every client, drawn apart, and alpha."""
    drawn = [task.model.init_server(task.data, 10 + client) for client in EVERYONE]
    return {**{name: np.stack([each[name] for each in drawn]) for name in drawn[0]}, "alpha": alpha.astype(np.float32)}


@pytest.mark.parametrize("execution", ["batched", "per_client"])
def test_apfl_is_a_rule_with_tensors_of_each_client(execution: str) -> None:
    task = make_task(digits(COUNTS), Softmax(), epochs=2, execution=execution)
    server, own = task.model.init_server(task.data, 0), personal(task, np.linspace(0.1, 0.9, len(COUNTS)))
    updates = train(task, server, rule=APFL(), own=own)
    for client in np.flatnonzero(COUNTS):
        plain, alpha, y = Plain(task, client), float(own["alpha"][client]), tensors(server)
        v = {name: torch.from_numpy(own[name][client]) for name in y}
        for batch in plain.batches:
            g = plain.gradient(y, batch)
            y = {name: y[name] - 0.1 * g[name] for name in y}
            g = plain.gradient({name: alpha * v[name] + (1 - alpha) * y[name] for name in y}, batch)
            v = {name: v[name] - 0.1 * alpha * g[name] for name in y}
        assert (
            relative_error({name: each[client] for name, each in updates.changes.items()}, changed(y, server)) <= 2e-5
        )
        got = {name: each[client] for name, each in updates.slots.items()}
        assert relative_error(got, {name: each.numpy() for name, each in v.items()}) <= 2e-6


def test_apfl_of_alpha_zero_is_fedavg_and_of_one_is_local_training() -> None:
    task = make_task(digits(COUNTS), Softmax())
    server = task.model.init_server(task.data, 0)
    shared, own = personal(task, np.zeros(8)), personal(task, np.ones(8))
    none = train(task, server, rule=APFL(), own=shared)
    assert all((none.slots[name] == shared[name]).all() for name in server)
    assert relative_error(none.changes, train(task, server).changes) <= 2e-6
    alone = train(task, server, start={name: own[name] for name in server})
    whole = train(task, server, rule=APFL(), own=own)
    got = {name: whole.slots[name] - own[name] for name in server}
    assert relative_error(got, alone.changes) <= 2e-5


@pytest.mark.parametrize("execution", ["batched", "per_client"])
def test_clients_may_start_from_parameters_of_their_own(execution: str) -> None:
    task = make_task(digits(COUNTS), Softmax(), epochs=2, execution=execution)
    own = personal(task, np.zeros(8))
    start = {name: each for name, each in own.items() if name != "alpha"}
    together = train(task, task.model.init_server(task.data, 0), start=start, start_loss=True)
    for client in EVERYONE:
        alone = train(task, {name: each[client] for name, each in start.items()}, [client], start_loss=True)
        for name, each in alone.changes.items():
            assert np.allclose(together.changes[name][client], each[0], atol=1e-6)
        assert together.start_loss is not None
        assert alone.start_loss is not None
        assert together.start_loss[client] == pytest.approx(alone.start_loss[0])


def test_a_rule_gives_the_same_in_any_chunk_and_in_runs_trained_together() -> None:
    with one_thread():  # as in the round loop
        task = make_task(digits(COUNTS), Softmax())
        server, own = task.model.init_server(task.data, 0), personal(task, np.linspace(0, 1, 8))
        whole, some = train(task, server, rule=APFL(), own=own), {name: each[2:5] for name, each in own.items()}
        part = train(task, server, EVERYONE[2:5], rule=APFL(), own=some)
        assert all((whole.slots[name][2:5] == part.slots[name]).all() for name in part.slots)
        terms = LocalTerms(rule=APFL(), own=own)
        tasks = [task, make_task(digits(COUNTS), Softmax()), make_task(digits(COUNTS), Softmax(), learning_rate=0.3)]
        calls = [LocalCall(server, Chunk(1, 0, EVERYONE, {}), each, terms) for each in tasks]
        for call, got in zip(calls, task.training.train_together(calls), strict=True):
            alone = call.task.training.train(server, call.chunk, call.task, terms)
            assert all((got.slots[name] == alone.slots[name]).all() for name in alone.slots)
            assert all((got.changes[name] == alone.changes[name]).all() for name in alone.changes)


def test_rules_are_refused_with_momentum_and_for_matrix_factorisation() -> None:
    task = make_task(digits(COUNTS), momentum=0.9)
    with pytest.raises(UserError, match=r"training.momentum = 0.9: .* set 0"):
        train(task, task.model.init_server(task.data, 0), rule=Descent())
    factors = make_factorisation(synthetic([20, 3]))
    chunk = Chunk(1, 0, np.arange(2), factors.model.init_clients(factors.data, 0))
    with pytest.raises(UserError, match="does not offer local steps of its own"):
        factors.training.train(factors.model.init_server(factors.data, 0), chunk, factors, LocalTerms(rule=Descent()))
