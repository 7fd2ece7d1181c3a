"""Mean loss of each client of a chunk before training: one forward pass over all of its samples."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from narrowcast.algorithms.local_training.chain_gradients import Tensors
from narrowcast.algorithms.local_training.device import float32_products, to_array
from narrowcast.algorithms.local_training.minibatch_schedule import BatchSchedule
from narrowcast.algorithms.local_training.network import (
    Loader,
    last_epoch_means,
    losses_of_module,
    of_each_client,
    rows_of,
)
from narrowcast.platform.models.losses import Loss
from narrowcast.platform.types import FloatArray, Rebuild


def mean_losses(
    module: nn.Module,
    loss: Loss,
    start: Tensors,
    loader: Loader,
    schedule: BatchSchedule,
    rebuild: Rebuild | None,
    frozen: Tensors,
    *,
    batched: bool,
) -> FloatArray:
    """Return the mean loss [C] of each client's parameters over the samples of a schedule of one epoch.

    Each tensor of `start` and `frozen` is [1, ...] if all clients have the same, else [C, ...]; all client axes are in
    the order of `schedule`.
    """
    compute = _batched if batched else _each
    with torch.no_grad(), float32_products(loader.device):
        return last_epoch_means(compute(module, loss, start, loader, schedule, rebuild, frozen), schedule)


def _batched(
    module: nn.Module,
    loss: Loss,
    start: Tensors,
    loader: Loader,
    schedule: BatchSchedule,
    rebuild: Rebuild | None,
    frozen: Tensors,
) -> FloatArray:
    n_clients, losses = len(schedule.order), []
    losses_of, values = losses_of_module(module, loss, n_clients, rebuild, frozen), of_each_client(start, n_clients)
    for batch in loader.batches(schedule):
        now = rows_of(values, slice(0, len(batch.labels)))
        losses.append((losses_of(now, batch.features, batch.labels)[0] * batch.weights).sum(1))
    return to_array(torch.cat(losses)).astype(np.float64) if losses else np.empty(0)


def _each(
    module: nn.Module,
    loss: Loss,
    start: Tensors,
    loader: Loader,
    schedule: BatchSchedule,
    rebuild: Rebuild | None,
    frozen: Tensors,
) -> FloatArray:
    step_starts = np.cumsum(schedule.active) - schedule.active
    losses = np.zeros(int(schedule.active.sum()))
    for client, n_steps in enumerate(schedule.steps):
        own = slice(client, client + 1)
        now, kept = ({name: rows[0] for name, rows in rows_of(part, own).items()} for part in (start, frozen))
        parameters = rebuild(now, kept) if rebuild else now
        for step in range(n_steps):
            batch = int(step_starts[step]) + client
            features, labels = loader.samples(schedule.samples[batch, : schedule.sizes[batch]])
            outputs = functional_call(module, dict(parameters), (features,))
            losses[batch] = float(loss.per_sample(outputs, labels).mean())
    return losses
