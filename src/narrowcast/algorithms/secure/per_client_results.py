"""The plain algorithm's result of each client of a chunk, still trained as one program if the algorithm allows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from narrowcast.platform.contracts import Task
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, LocalUpdates


def train_each(algorithm: Any, broadcast: Arrays, chunk: Chunk, task: Task) -> list[ChunkResult]:
    """Return the plain result of each client alone, in the order of the chunk.

    Budgets, losses and keys concern the protected upload: the plain algorithm sees none of them.
    """
    chunk = replace(chunk, budget_bits=None, lost=None, relayed=None, secrets={})
    alone = [chunk.take(np.array([place])) for place in range(len(chunk.clients))]
    if (call := algorithm.local_call(broadcast, chunk, task)) is not None:
        updates = task.training.train(call.server, chunk, task, call.terms)
        return [algorithm.upload(broadcast, one, task, _updates_of(updates, place)) for place, one in enumerate(alone)]
    return [algorithm.train(broadcast, one, task) for one in alone]


def _updates_of(updates: LocalUpdates, place: int) -> LocalUpdates:
    only = slice(place, place + 1)
    return LocalUpdates(
        changes={name: values[only] for name, values in updates.changes.items()},
        state={name: values[only] for name, values in updates.state.items()},
        loss=updates.loss[only],
        examples=updates.examples[only],
        steps=updates.steps[only],
        start_loss=None if updates.start_loss is None else updates.start_loss[only],
        slots={name: values[only] for name, values in updates.slots.items()},
        rate_sum=None if updates.rate_sum is None else updates.rate_sum[only],
    )
