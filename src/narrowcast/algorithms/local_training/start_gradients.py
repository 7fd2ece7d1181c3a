"""Gradient of the mean loss of each client of a chunk before training: one pass over all of its samples."""

from __future__ import annotations

import torch
from torch import nn

from narrowcast.algorithms.local_training.chain_gradients import Tensors
from narrowcast.algorithms.local_training.device import float32_products, to_tensor
from narrowcast.algorithms.local_training.minibatch_schedule import BatchSchedule
from narrowcast.algorithms.local_training.network import (
    Loader,
    Steps,
    gradients_of_module,
    of_each_client,
    rows_of,
)
from narrowcast.algorithms.local_training.rule_steps import gradient_of_one, step_batches
from narrowcast.platform.models.losses import Loss
from narrowcast.platform.types import Rebuild


def mean_gradients(
    module: nn.Module,
    loss: Loss,
    start: Tensors,
    loader: Loader,
    schedule: BatchSchedule,
    rebuild: Rebuild | None,
    frozen: Tensors,
    *,
    batched: bool,
) -> Tensors:
    """Return the gradient [C, ...] of each client's mean loss over the samples of a schedule of one epoch, at `start`.

    Each tensor of `start` and `frozen` is [1, ...] if all clients have the same, else [C, ...]; all client axes are in
    the order of `schedule`.
    """
    n_clients, steps = len(schedule.order), Steps([], rebuild=rebuild, frozen=frozen)
    values = of_each_client(start, n_clients)
    total = {name: torch.zeros_like(tensor, memory_format=torch.contiguous_format) for name, tensor in values.items()}
    of_all = gradients_of_module(module, loss, n_clients, steps) if batched else None
    # Batches of a client differ in size, so that the mean over its samples weighs them by theirs.
    samples = torch.zeros(n_clients, dtype=loader.dtype, device=loader.device)
    with float32_products(loader.device):
        for _, rows, places, batch in step_batches(loader, schedule, batched=batched):
            sizes = to_tensor(schedule.sizes[places], loader.device).to(loader.dtype)
            compute = of_all or gradient_of_one(module, loss, rows_of(frozen, rows), steps)
            weights = batch.weights * sizes.unsqueeze(1)
            gradients, _ = compute(rows_of(values, rows), batch.features, batch.labels, weights)
            samples[rows] += sizes
            for name, gradient in gradients.items():
                total[name][rows] += gradient
    for tensor in total.values():
        tensor.div_(samples.clamp(min=1).view(-1, *[1] * (tensor.ndim - 1)))
    return total
