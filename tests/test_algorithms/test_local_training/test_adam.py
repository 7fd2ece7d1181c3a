"""Adam and AdamW at clients, against torch's own optimisers in a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from digits import digits, run
from narrowcast.algorithms.federated.apfl import APFL
from narrowcast.algorithms.federated.fairness import QFFL
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.feddyn import FedDyn
from narrowcast.algorithms.federated.fednova import FedNova
from narrowcast.algorithms.federated.fedpara import FedPara
from narrowcast.algorithms.federated.fedprox import FedProx
from narrowcast.algorithms.federated.low_rank import CoLR
from narrowcast.algorithms.federated.scaffold import Scaffold
from narrowcast.algorithms.local_training.batches import draw_schedule
from narrowcast.algorithms.local_training.graph import GraphTraining
from narrowcast.algorithms.local_training.rules import InverseTime, StepDecay
from narrowcast.algorithms.local_training.sgd import Adam, AdamW, NetworkTraining
from narrowcast.laws.small_tasks import task_of
from narrowcast.platform.contracts import LocalCall, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.graph import GCN
from narrowcast.platform.models.networks import CNN, MLP, Softmax
from narrowcast.platform.rounds.fleet import LogNormalFleet
from narrowcast.platform.seeds import PrivateSeed
from narrowcast.platform.types import Arrays, Chunk, LocalTerms

COUNTS = [21, 8, 40, 3, 17, 8, 0, 30]
TRAININGS: Mapping[str, tuple[type[NetworkTraining], Callable[..., torch.optim.Optimizer]]] = {
    "adam": (Adam, torch.optim.Adam),
    "adamw": (AdamW, torch.optim.AdamW),
}
MODELS = {"chain": MLP(hidden=(9,), dtype="float64"), "convolution": CNN(channels=(2, 3), hidden=5, dtype="float64")}


def make_task(training: NetworkTraining, model: Any = MODELS["chain"], seed: int = 3) -> Task:
    data = digits(COUNTS, images=isinstance(model, CNN))
    profiles = LogNormalFleet().profiles(data.examples, seed)
    return Task(data, profiles, model, training, seed, PrivateSeed.derived(seed))


def plain(task: Task, server: Arrays, client: int, round_index: int = 1, mu: float = 0.0) -> dict[str, np.ndarray]:
    """One client's model after a round, by a module, autograd and torch's own optimiser."""
    training, data = task.training, task.data
    module = task.model.module(data).double()
    module.load_state_dict({name: torch.from_numpy(np.array(values)) for name, values in server.items()})
    optimiser = TRAININGS[training.kind][1](
        module.parameters(),
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        eps=training.eps,
        weight_decay=training.weight_decay,
    )
    one = np.array([client])
    keys = task.private_seed.stream_keys("shuffle", round_index, one)
    schedule = draw_schedule(data.examples[one], np.array([training.epochs]), training.batch_size, keys)
    own = data.order[data.indptr[client] : data.indptr[client + 1]]
    for batch, size in zip(schedule.samples, schedule.sizes, strict=True):
        picked = data.train.take(own[batch[:size]])
        outputs = module(torch.from_numpy(picked.features).double())
        loss = nn.functional.cross_entropy(outputs, torch.from_numpy(picked.labels))
        for name, parameter in module.named_parameters():
            loss = loss + mu / 2 * (parameter - torch.from_numpy(np.array(server[name]))).square().sum()
        optimiser.zero_grad()
        loss.backward()
        if training.clip_norm is not None:
            gradients = [parameter.grad for parameter in module.parameters()]  # torch's own adds 1e-6 to the norm
            scale = training.clip_norm / nn.utils.get_total_norm([each for each in gradients if each is not None])
            nn.utils.clip_grads_with_norm_(module.parameters(), training.clip_norm, training.clip_norm / scale - 1e-6)
        optimiser.step()
    return {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}


def difference(one: Arrays, other: Arrays) -> float:
    return max(float(np.abs(np.asarray(one[name]) - np.asarray(other[name])).max()) for name in one)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("execution", ["batched", "per_client"])
@pytest.mark.parametrize("kind", TRAININGS)
@pytest.mark.parametrize(
    ("settings", "mu"),
    [
        ({}, 0.0),
        ({"weight_decay": 0.3, "clip_norm": 0.5}, 0.0),
        ({"weight_decay": 0.0, "beta1": 0.0, "beta2": 0.5, "eps": 1e-2}, 0.7),
    ],
    ids=["defaults", "decay and clipping", "proximal"],
)
def test_steps_are_those_of_torch(kind: str, settings: dict[str, Any], mu: float, execution: str, model: str) -> None:
    training = TRAININGS[kind][0](learning_rate=0.02, batch_size=8, epochs=3, execution=execution, **settings)
    task = make_task(training, MODELS[model])
    server = task.model.init_server(task.data, 0)
    chunk = Chunk(1, 0, np.arange(len(COUNTS)), {})
    updates = task.training.train(server, chunk, task, LocalTerms(proximal=mu))
    for client in range(len(COUNTS)):
        wanted = plain(task, server, client, mu=mu)
        changes = {name: server[name] + values[client] for name, values in updates.changes.items()}
        assert difference(changes, wanted) <= 1e-11
    assert updates.steps.tolist() == [3 * -(-count // 8) for count in COUNTS]


@pytest.mark.parametrize("kind", TRAININGS)
def test_each_round_begins_with_moments_of_zero(kind: str) -> None:
    """Two rounds of FedAvg with equal weights are the mean of two rounds of new optimisers."""
    task = make_task(TRAININGS[kind][0](learning_rate=0.02, batch_size=8, epochs=2))
    model = task.model.init_server(task.data, task.seed)
    for round_index in (1, 2):
        clients = [plain(task, model, client, round_index) for client in np.flatnonzero(COUNTS)]
        # a client without samples delivers no change, which counts
        model = {name: np.mean([each[name] for each in clients], axis=0) for name in model}
    got = run(FedAvg(weights="equal"), task, n_rounds=2).server
    assert difference(model, got) <= 1e-11


@pytest.mark.parametrize("schedule", [None, StepDecay(every=1), InverseTime(alpha=0.5, gamma=9)])
@pytest.mark.parametrize("kind", TRAININGS)
def test_runs_of_other_rates_trained_together_are_those_trained_alone(kind: str, schedule: Any) -> None:
    settings = {"batch_size": 8, "epochs": 2, "learning_rate_schedule": schedule}
    tasks = [make_task(TRAININGS[kind][0](learning_rate=rate, **settings)) for rate in (0.01, 0.3)]
    server = tasks[0].model.init_server(tasks[0].data, 0)
    chunk = Chunk(2, 0, np.arange(len(COUNTS)), {})
    together = tasks[0].training.train_together([LocalCall(server, chunk, task, LocalTerms()) for task in tasks])
    for task, each in zip(tasks, together, strict=True):
        alone = task.training.train(server, chunk, task, LocalTerms())
        assert difference(each.changes, alone.changes) <= 1e-12
    assert difference(*(each.changes for each in together)) > 0.1


def test_components_that_a_client_does_not_train_stay() -> None:
    """A gain of 0 is a gradient of 0 in every step, which moves nothing."""
    task = make_task(Adam(learning_rate=0.02))
    server = task.model.init_server(task.data, 0)
    gains = {"1.weight": np.zeros((len(COUNTS), 9, 1))}
    gains["1.weight"][:, :4] = 2.0
    updates = task.training.train(server, Chunk(1, 0, np.arange(len(COUNTS)), {}), task, LocalTerms(gains=gains))
    some = np.flatnonzero(COUNTS)
    assert not updates.changes["1.weight"][:, 4:].any()
    assert (np.abs(updates.changes["1.weight"][some, :4]).max(axis=(1, 2)) > 0.01).all()


@pytest.mark.parametrize(
    "algorithm",
    [
        FedAvg(codec=[{"kind": "quantise", "levels": 7}]),  # type: ignore[arg-type]
        FedAvg(server_optimizer="yogi", server_learning_rate=0.03),  # type: ignore[arg-type]
        *(FedProx(mu=0.1), FedDyn(alpha=0.1), QFFL(q=0), QFFL(q=1, lipschitz=1), Scaffold(control="gradient")),
        *(CoLR(rank=4), FedPara()),
    ],
    ids=lambda each: each.kind,
)
@pytest.mark.parametrize("kind", TRAININGS)
def test_algorithms_learn_with_it(algorithm: Any, kind: str) -> None:
    task = make_task(TRAININGS[kind][0](learning_rate=0.01, batch_size=8, epochs=3))
    before, state = algorithm.init(task), run(algorithm, task, n_rounds=4)
    first, last = (
        task.model.evaluate(algorithm.final(each), {}, task.data, "test")["loss"] for each in (before, state.server)
    )
    assert last < 0.95 * first


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (Scaffold(), r"algorithm.control = update takes .*kind = adam does not .*; use sgd, or set algorithm.control"),
        (FedNova(), r"fednova needs local steps that are linear .*kind = adam does not take such steps; use sgd$"),
        (QFFL(q=1), r"algorithm.lipschitz = null stands for 1 / training.learning_rate.*use sgd, or set a value of"),
        (APFL(), r"apfl trains two models by steps along their gradients, and training.kind = adam"),
    ],
    ids=lambda each: getattr(each, "kind", ""),
)
def test_algorithms_that_need_gradient_descent_say_so(algorithm: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        algorithm.check(make_task(Adam()))


def test_a_rule_of_the_algorithms_own_is_refused_in_training() -> None:
    task = make_task(Adam(), Softmax())
    server, chunk = task.model.init_server(task.data, 0), Chunk(1, 0, np.arange(3), {})
    terms = LocalTerms(rule=APFL().terms(chunk, make_task(Adam(), Softmax())).rule)
    with pytest.raises(UserError, match=r"own local step goes along gradients, and training\.kind = adam"):
        task.training.train(server, chunk, task, terms)


def test_graphs_trained_by_adam_are_refused_too() -> None:
    task = task_of(GCN(), training=GraphTraining())
    with pytest.raises(UserError, match=r"takes a client's change over its learning rates .*kind = graph does not"):
        Scaffold().check(task)
    Scaffold().check(task_of(GCN(), training=GraphTraining(optimizer="sgd")))
