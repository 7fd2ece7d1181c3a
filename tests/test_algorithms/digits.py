"""A small federated classification task on scikit-learn's digits, and a plain loop over clients to compare with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from narrowcast.algorithms.local_training.minibatch_schedule import draw_schedule
from narrowcast.algorithms.local_training.sgd import SGD
from narrowcast.platform.contracts import Algorithm, Task
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.local_backend import LocalExecutor
from narrowcast.platform.models.classifier import Classifier
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.population import Population
from narrowcast.platform.rounds import Plan, RunState, cut, rounds, start
from narrowcast.platform.seeds import stream_keys
from narrowcast.platform.simulation.fleet import LogNormalFleet
from narrowcast.platform.types import Arrays, ChunkResult


def digits(counts: list[int], *, images: bool = False) -> Samples:
    """The first digits dealt out to clients of these sizes; 200 test samples."""
    bunch = load_digits()
    features = (bunch.data / 16).astype(np.float32)
    if images:
        features = features.reshape(-1, 1, 8, 8)
    labels = bunch.target.astype(np.int64)
    n_train = 1400
    order = np.random.default_rng(0).permutation(n_train)[: sum(counts)]
    return Samples(
        name="digits",
        source="scikit-learn",
        n_classes=10,
        train=Labelled(features[:n_train], labels[:n_train]),
        validation=Labelled(features[:0], labels[:0]),
        test=Labelled(features[n_train : n_train + 200], labels[n_train : n_train + 200]),
        order=order,
        indptr=np.concatenate([[0], np.cumsum(counts)]),
    )


def make_task(data: Samples, model: Classifier | None = None, **training: Any) -> Task:
    """A task whose parts fit together."""
    settings = {"learning_rate": 0.1, "batch_size": 8, **training}
    task = Task(data, LogNormalFleet().profiles(data.examples, 0), model or MLP(hidden=(16,)), SGD(**settings), 0)
    task.model.check(data)
    task.training.check(task)
    return task


def run(algorithm: Algorithm, task: Task, *, n_rounds: int = 1, clients: int = 8, chunk_size: int = 3) -> RunState:
    """The state after some rounds in this process."""
    algorithm.check(task)
    plan = Plan(seed=task.seed, rounds=n_rounds, clients_per_round=clients, chunk_size=chunk_size)
    last = list(rounds(plan, algorithm, task, LocalExecutor(algorithm, task), start(algorithm, task)))[-1].state
    assert last is not None
    return last


def train(algorithm: Algorithm, task: Task, chunk_size: int = 100) -> list[ChunkResult]:
    """What the chunks of a first round of all clients give."""
    broadcast = algorithm.broadcast(algorithm.init(task), task, 1).arrays
    population = Population.fresh(algorithm.init_clients(task), task.data.n_clients)
    everyone = np.arange(task.data.n_clients)
    return LocalExecutor(algorithm, task).train(broadcast, cut(everyone, task.data.examples, chunk_size, 1, population))


def plain_client(task: Task, server: Arrays, client: int, *, mu: float = 0.0) -> dict[str, np.ndarray]:
    """One client's model after round 1, by a module, autograd and torch's own optimiser."""
    training: SGD = task.training
    module = task.model.module(task.data)
    module.load_state_dict({name: torch.from_numpy(np.array(values)) for name, values in server.items()})
    optimiser = torch.optim.SGD(
        module.parameters(), training.learning_rate, training.momentum, weight_decay=training.weight_decay
    )
    one = np.array([client])
    schedule = draw_schedule(
        task.data.examples[one],
        np.array([training.epochs]),
        training.batch_size,
        stream_keys(task.seed, "shuffle", 1, one),
    )
    own = task.data.order[task.data.indptr[client] : task.data.indptr[client + 1]]
    for batch, size in zip(schedule.samples, schedule.sizes, strict=True):
        picked = task.data.train.take(own[batch[:size]])
        loss = nn.functional.cross_entropy(module(torch.from_numpy(picked.features)), torch.from_numpy(picked.labels))
        for name, parameter in module.named_parameters():
            loss = loss + mu / 2 * (parameter - torch.from_numpy(np.array(server[name]))).square().sum()
        optimiser.zero_grad()
        loss.backward()
        if training.clip_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), training.clip_norm)
        optimiser.step()
    return {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}


def relative_error(got: Arrays, wanted: Arrays) -> float:
    """The largest difference of any tensor, relative to that tensor's largest entry."""
    assert set(got) == set(wanted)
    return max(
        float(np.abs(np.asarray(got[name]) - np.asarray(wanted[name])).max() / np.abs(wanted[name]).max())
        for name in wanted
    )
