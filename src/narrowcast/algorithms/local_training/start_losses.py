"""Mean loss of each client of a chunk before training: one forward pass over all of its samples."""

from __future__ import annotations

import numpy as np
import torch

from narrowcast.algorithms.local_training.batched_module import callable_of
from narrowcast.algorithms.local_training.device import float32_products, to_array
from narrowcast.algorithms.local_training.network import last_epoch_means, losses_of_module, of_each_client, rows_of
from narrowcast.algorithms.local_training.start_point import StartPoint
from narrowcast.platform.models.module_call import call_module
from narrowcast.platform.types import FloatArray


def mean_losses(point: StartPoint) -> FloatArray:
    """Return the mean loss [C] of each client's parameters over its samples."""
    with torch.no_grad(), float32_products(point.loader.device):
        return last_epoch_means(_batched(point) if point.batched else _each(point), point.schedule)


def _batched(point: StartPoint) -> FloatArray:
    n_clients, losses = len(point.schedule.order), []
    losses_of = losses_of_module(
        callable_of(point.module, point.loader.device), point.loss, n_clients, point.rebuild, point.frozen
    )
    values = of_each_client(point.values, n_clients)
    for batch in point.loader.batches(point.schedule):
        now = rows_of(values, slice(0, len(batch.labels)))
        losses.append((losses_of(now, batch.features, batch.labels)[0] * batch.weights).sum(1))
    return to_array(torch.cat(losses)).astype(np.float64) if losses else np.empty(0)


def _each(point: StartPoint) -> FloatArray:
    schedule, module = point.schedule, callable_of(point.module, point.loader.device)
    step_starts = np.cumsum(schedule.active) - schedule.active
    losses = np.zeros(int(schedule.active.sum()))
    for client, n_steps in enumerate(schedule.steps):
        own = slice(client, client + 1)
        now, kept = (
            {name: rows[0] for name, rows in rows_of(each, own).items()} for each in (point.values, point.frozen)
        )
        parameters = point.rebuild(now, kept) if point.rebuild else now
        for step in range(n_steps):
            batch = int(step_starts[step]) + client
            features, labels = point.loader.samples(schedule.samples[batch, : schedule.sizes[batch]])
            point.draws.seed(client, step)
            outputs = call_module(module, features, parameters)
            losses[batch] = float(point.loss.per_sample(outputs, labels).mean())
    return losses
