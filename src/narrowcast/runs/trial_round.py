"""A trial of round 1 with one client, for experiments that name classes of others; nothing of it is kept.

A method that returns another type or shape than its contract asks for, or raises, is found here, before the folder of
the run and its MLflow run are made.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import torch

from narrowcast.platform.config import plugins
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.contract_checks import (
    check_arrays,
    check_broadcast,
    check_final,
    check_metrics,
    check_result,
    check_step,
    check_updates,
    method_of,
    naming,
)
from narrowcast.platform.types import Arrays, Chunk, LocalTerms

if TYPE_CHECKING:
    from narrowcast.experiment import Experiment
    from narrowcast.platform.contracts import Task


def try_round(experiment: Experiment, task: Task) -> None:
    """Train the client with the fewest examples for one epoch, and step the server; nothing of it is kept.

    Raise `UserError` if a class of the experiment breaks its contract. Experiments of classes of the package are not
    tried, nor those whose clients train in other processes, since a module can end the one that it is in, or on a
    device that this machine lacks.
    """
    elsewhere = experiment.backend.kind != "local" or (task.training.device == "cuda" and not torch.cuda.is_available())
    if elsewhere or not plugins.named_in(experiment.plain()) or not task.data.examples.any():
        return
    model, algorithm = task.model, experiment.algorithm
    with _tried(model, "init_server"):
        check_arrays(model.init_server(task.data, task.seed), method_of(model, "init_server"))
        parameters = task.initial_parameters()
    with _tried(algorithm, "init"):
        server = check_arrays(algorithm.init(task), method_of(algorithm, "init"))
    with _tried(algorithm, "init_clients"):
        clients = check_arrays(algorithm.init_clients(task), method_of(algorithm, "init_clients"))
    for name, values in clients.items():
        if len(values) != task.data.n_clients:
            raise UserError(
                f"{method_of(algorithm, 'init_clients')} returned {len(values)} rows for {name}; return a row for each "
                f"of {task.data.n_clients} clients"
            )
    with _tried(algorithm, "broadcast"):
        broadcast = algorithm.broadcast(server, task, 1)
        check_broadcast(broadcast, method_of(algorithm, "broadcast"))
    chunk = _smallest_client(task, clients)
    _try_training(task, chunk)
    with _tried(algorithm, "train"):
        result = algorithm.train(broadcast.arrays, chunk, task)
        check_result(result, chunk, method_of(algorithm, "train"))
    with _tried(algorithm, "step"), np.errstate(over="ignore", invalid="ignore"):
        try:
            stepped = algorithm.step(server, broadcast.arrays, algorithm.fold([result.partial]), task, 1)
        except UserError:
            return  # some servers refuse one client
        check_step(algorithm, server, stepped)
    with _tried(algorithm, "final"):
        final = check_final(algorithm, parameters, stepped)
    if algorithm.traits.global_model:
        with _tried(model, "evaluate"):
            check_metrics(model.evaluate(final, clients, task.data, "validation"), method_of(model, "evaluate"))


def _smallest_client(task: Task, clients: Arrays) -> Chunk:
    examples = task.data.examples
    client = np.flatnonzero(examples == examples[examples > 0].min())[:1]
    state = {name: values[client] for name, values in clients.items()}
    return Chunk(1, 0, client, state, epochs=np.ones(1, dtype=np.int64))


def _try_training(task: Task, chunk: Chunk) -> None:
    """Train the clients of the chunk from the model's own parameters, if the training is a class of others."""
    if plugins.is_own(task.training):
        return
    server = task.initial_parameters()
    with _tried(task.training, "train"):
        updates = task.training.train(server, chunk, task, LocalTerms())
        check_updates(updates, server, len(chunk.clients), method_of(task.training, "train"))


def _tried(value: object, method: str) -> AbstractContextManager[None]:
    return naming(value, method, ", tried with one client before round 1")
