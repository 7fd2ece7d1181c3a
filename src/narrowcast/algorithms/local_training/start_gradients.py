"""Gradient of the mean loss of each client of a chunk before training: one pass over all of its samples."""

from __future__ import annotations

import torch

from narrowcast.algorithms.local_training.batched_module import callable_of
from narrowcast.algorithms.local_training.chain_gradients import Tensors
from narrowcast.algorithms.local_training.device import float32_products, to_tensor
from narrowcast.algorithms.local_training.network import Steps, gradients_of_module, of_each_client, rows_of
from narrowcast.algorithms.local_training.rule_steps import gradient_of_one, step_batches
from narrowcast.algorithms.local_training.start_point import StartPoint


def mean_gradients(point: StartPoint) -> Tensors:
    """Return the gradient [C, ...] of each client's mean loss over its samples, in its values before training."""
    loader, schedule, module = point.loader, point.schedule, callable_of(point.module, point.loader.device)
    n_clients, steps = len(schedule.order), Steps([], rebuild=point.rebuild, frozen=point.frozen)
    values = of_each_client(point.values, n_clients)
    total = {name: torch.zeros_like(tensor, memory_format=torch.contiguous_format) for name, tensor in values.items()}
    of_all = gradients_of_module(module, point.loss, n_clients, steps) if point.batched else None
    # Batches of a client differ in size, so that the mean over its samples weighs them by theirs.
    samples = torch.zeros(n_clients, dtype=loader.dtype, device=loader.device)
    with float32_products(loader.device):
        for _, rows, places, batch in step_batches(loader, schedule, point.draws, batched=point.batched):
            sizes = to_tensor(schedule.sizes[places], loader.device).to(loader.dtype)
            compute = of_all or gradient_of_one(module, point.loss, rows_of(point.frozen, rows), steps)
            weights = batch.weights * sizes.unsqueeze(1)
            gradients, _ = compute(rows_of(values, rows), batch.features, batch.labels, weights)
            samples[rows] += sizes
            for name, gradient in gradients.items():
                total[name][rows] += gradient
    for tensor in total.values():
        tensor.div_(samples.clamp(min=1).view(-1, *[1] * (tensor.ndim - 1)))
    return total
