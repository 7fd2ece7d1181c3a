"""The metrics of a run's global model, and the digest that identifies it."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from narrowcast.platform.client_metrics import client_statistics, measure_clients
from narrowcast.platform.contracts import Algorithm, Split
from narrowcast.platform.run import Run
from narrowcast.platform.state import LiveState, RunState
from narrowcast.platform.types import Arrays


def evaluate(live: LiveState) -> dict[str, float]:
    """Return the metrics of both held-out splits, named `validation.METRIC` and `test.METRIC`, of the global model."""
    task = live.run.task
    if not getattr(live.run.algorithm, "has_global_model", True):
        return {}
    server, clients = live.run.algorithm.final(live.server), live.population.arrays
    splits: tuple[Split, Split] = ("validation", "test")
    return {
        f"{split}.{name}": value
        for split in splits
        for name, value in task.model.evaluate(server, clients, task.data, split).items()
    }


def measure(run: Run, state: RunState) -> dict[str, float]:
    """Return the metrics of a saved state, as the round loop gives them."""
    live = LiveState.of(run, state)
    return evaluate(live) | client_statistics(run, measure_clients(live))


def model_sha256(algorithm: Algorithm, state: RunState) -> str:
    """Return the sha256 of the global parameters and of the private state of all clients that took part."""
    hasher = hashlib.sha256()
    for owner, arrays in (("server", algorithm.final(state.server)), ("clients", state.clients)):
        hash_arrays(hasher, arrays, f"{owner}\0")
    return hasher.hexdigest()


def hash_arrays(hasher: Any, arrays: Arrays, prefix: str = "") -> None:
    """Add the names, each after the prefix, types, shapes and values of arrays to a hash, in the order of names."""
    for name in sorted(arrays):
        values = np.ascontiguousarray(arrays[name])
        hasher.update(f"{prefix}{name}\0{values.dtype.str}\0{values.shape}\0".encode())
        hasher.update(values.reshape(-1).view(np.uint8).data)
