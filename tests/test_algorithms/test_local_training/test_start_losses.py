"""The mean loss of the parameters that clients start from, over all samples of each client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from digits import digits, make_task
from narrowcast.platform.contracts import LocalCall, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import CNN, MLP
from narrowcast.platform.models.neural_network import NeuralNetwork
from narrowcast.platform.types import Arrays, Chunk, FloatArray, LocalTerms
from per_client import make_task as make_factorisation
from per_client import synthetic

COUNTS = [21, 8, 40, 3, 17, 8, 0, 30]
EVERYONE = np.arange(len(COUNTS))


def plain_losses(task: Task, server: Arrays) -> FloatArray:
    """Client by client, the module's mean cross-entropy over all samples at once."""
    module = task.model.module(task.data)
    module.load_state_dict({name: torch.from_numpy(np.array(values)) for name, values in server.items()})
    losses = np.zeros(task.data.n_clients)
    for client in np.flatnonzero(task.data.examples):
        own = task.data.train.take(task.data.order[task.data.indptr[client] : task.data.indptr[client + 1]])
        with torch.no_grad():
            outputs = module(torch.from_numpy(own.features))
        losses[client] = nn.functional.cross_entropy(outputs, torch.from_numpy(own.labels))
    return losses


def start_losses(task: Task, server: Arrays, **terms: Any) -> FloatArray:
    updates = task.training.train(server, Chunk(1, 0, EVERYONE, {}), task, LocalTerms(start_loss=True, **terms))
    assert updates.start_loss is not None
    return updates.start_loss


@pytest.mark.parametrize("execution", ["batched", "per_client"])
@pytest.mark.parametrize("model", [MLP(hidden=(16,)), CNN(channels=(4, 8), hidden=16)], ids=lambda each: each.kind)
def test_it_is_the_loss_before_training_whatever_is_trained(model: NeuralNetwork, execution: str) -> None:
    data = digits(COUNTS, images=model.kind == "cnn")
    task = make_task(data, model, epochs=2, execution=execution)
    server = model.init_server(data, 0)
    wanted = plain_losses(task, server)
    unequal = np.array([1, 4, 1, 3, 0, 2, 2, 1])
    for got in (start_losses(task, server), start_losses(task, server, epochs=unequal, proximal=0.1)):
        assert np.allclose(got, wanted, rtol=1e-5)


def test_it_costs_nothing_unless_asked_for_and_changes_no_update() -> None:
    task, chunk = make_task(digits(COUNTS)), Chunk(1, 0, EVERYONE, {})
    server = task.model.init_server(task.data, 0)
    plain, asked = (task.training.train(server, chunk, task, LocalTerms(start_loss=each)) for each in (False, True))
    assert plain.start_loss is None
    assert all((plain.changes[name] == asked.changes[name]).all() for name in plain.changes)


@pytest.mark.parametrize("execution", ["batched", "per_client"])
def test_rebuilt_parameters_are_the_ones_measured(execution: str) -> None:
    task = make_task(digits(COUNTS), execution=execution)
    server = task.model.init_server(task.data, 0)
    halves = {name: values / 2 for name, values in server.items()}

    def add(trained: Mapping[str, Any], frozen: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: trained[name] + frozen[name] for name in trained}

    assert np.allclose(start_losses(task, halves, rebuild=add, frozen=halves), plain_losses(task, server), rtol=1e-5)


def test_it_depends_neither_on_the_chunk_nor_on_runs_trained_together() -> None:
    tasks = [make_task(digits(COUNTS), learning_rate=rate) for rate in (0.1, 0.3)]
    servers = [task.model.init_server(task.data, seed) for seed, task in enumerate(tasks)]
    terms, chunk = LocalTerms(start_loss=True), Chunk(1, 0, EVERYONE, {})
    alone = [start_losses(task, server) for task, server in zip(tasks, servers, strict=True)]
    calls = [LocalCall(server, chunk, task, terms) for task, server in zip(tasks, servers, strict=True)]
    together = tasks[0].training.train_together(calls)
    for one, each in zip(alone, together, strict=True):
        assert (one == each.start_loss).all()
    some = tasks[0].training.train(servers[0], Chunk(1, 0, EVERYONE[2:5], {}), tasks[0], terms)
    assert (some.start_loss == alone[0][2:5]).all()


def test_matrix_factorisation_says_that_it_has_none() -> None:
    task = make_factorisation(synthetic([20, 3]))
    chunk = Chunk(1, 0, np.arange(2), task.model.init_clients(task.data, 0))
    with pytest.raises(UserError, match="does not offer the loss before training"):
        task.training.train(task.model.init_server(task.data, 0), chunk, task, LocalTerms(start_loss=True))
