"""The metrics of a run's global model, and the digest that identifies it."""

from __future__ import annotations

import hashlib

from narrowcast.platform.client_metrics import client_statistics, measure_clients
from narrowcast.platform.contracts import Algorithm, Split, Task
from narrowcast.platform.run import Run
from narrowcast.platform.state import LiveState, RunState
from narrowcast.platform.types import Arrays, FloatArray, hash_arrays


def evaluate(live: LiveState) -> dict[str, float]:
    """Return the metrics of both held-out splits, named `validation.METRIC` and `test.METRIC`, of the global model."""
    task = live.run.task
    if not live.run.algorithm.traits.global_model:
        return {}
    return metrics_of(task, live.run.algorithm.final(live.server), live.population.arrays)


def metrics_of(task: Task, model: Arrays, clients: Arrays) -> dict[str, float]:
    """Return the metrics of both held-out splits of a global model, with the private state of all clients."""
    splits: tuple[Split, Split] = ("validation", "test")
    return {
        f"{split}.{name}": value
        for split in splits
        for name, value in task.model.evaluate(model, clients, task.data, split).items()
    }


def measure(run: Run, state: RunState) -> dict[str, float]:
    """Return the metrics of a saved state, as the round loop gives them."""
    return measure_all(run, state)[0]


def measure_all(run: Run, state: RunState) -> tuple[dict[str, float], dict[str, FloatArray]]:
    """Return the metrics of a saved state, as the round loop gives them, and those of each client."""
    live = LiveState.of(run, state)
    of_clients = measure_clients(live)
    return evaluate(live) | client_statistics(run, of_clients), of_clients


def model_sha256(algorithm: Algorithm, state: RunState) -> str:
    """Return the sha256 of the global parameters and of the private state of all clients that took part."""
    return sha256_of(algorithm.final(state.server), state.clients)


def sha256_of(model: Arrays, clients: Arrays) -> str:
    """Return the sha256 of a global model and of the private state of the clients that took part, if they have one."""
    hasher = hashlib.sha256()
    for owner, arrays in (("server", model), ("clients", clients)):
        hash_arrays(hasher, arrays, f"{owner}\0")
    return hasher.hexdigest()
