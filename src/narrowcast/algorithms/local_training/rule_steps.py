"""Local training by a rule of the algorithm's own in place of gradient descent, batched or client by client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from narrowcast.algorithms.local_training.batched_module import callable_of
from narrowcast.algorithms.local_training.chain_gradients import ChainGradient, Tensors
from narrowcast.algorithms.local_training.device import to_array, to_tensor
from narrowcast.algorithms.local_training.forward_draws import ForwardDraws
from narrowcast.algorithms.local_training.minibatch_schedule import BatchSchedule
from narrowcast.algorithms.local_training.network import (
    Loader,
    StepBatch,
    Steps,
    add_terms,
    decay_of_rebuilt,
    gradients_of_module,
    last_epoch_means,
    of_each_client,
    rows_of,
)
from narrowcast.platform.data.features import each_input
from narrowcast.platform.models.losses import Loss
from narrowcast.platform.models.module_call import Inputs, call_module
from narrowcast.platform.types import FloatArray, LocalRule


def train_by_rule(
    module: nn.Module,
    loss: Loss,
    rule: LocalRule,
    start: Tensors,
    loader: Loader,
    schedule: BatchSchedule,
    steps: Steps,
    *,
    batched: bool,
) -> tuple[Tensors, FloatArray, Tensors]:
    """Train every client by the rule; return changes, loss as `train_network` does, and what the rule kept, [C, ...].

    `start` is [1 or C, ...]; all client axes are in the order of `schedule`.
    """
    values = {name: tensor.clone() for name, tensor in of_each_client(start, len(schedule.order)).items()}
    slots = rule.init({name: tensor.clone() for name, tensor in values.items()}, steps.own)
    losses = torch.zeros(len(schedule.valid), dtype=torch.float64)
    module = callable_of(module, loader.device)
    gradients_of = gradients_of_module(module, loss, len(schedule.order), steps) if batched else None
    for step, rows, places, batch in step_batches(loader, schedule, steps.draws, batched=batched):
        sizes = to_tensor(schedule.sizes[places], loader.device)
        parts = _parts(batch.weights, sizes, rule.parts)
        compute = gradients_of or gradient_of_one(module, loss, rows_of(steps.frozen, rows), steps)
        at_first: list[Tensor] = []

        def gradient(
            at: Mapping[str, Tensor],
            part: int,
            # of this step
            compute: ChainGradient = compute,
            batch: StepBatch = batch,
            parts: Sequence[Tensor] = parts,
            rows: slice = rows,
            at_first: list[Tensor] = at_first,
        ) -> Tensors:
            gradients, of_samples = compute(at, batch.features, batch.labels, parts[part])
            if not at_first:
                at_first.append((of_samples * batch.weights).sum(1))
            add_terms(dict(at), start, gradients, steps, rows)
            return gradients

        rate = steps.learning_rate(step)
        assert isinstance(rate, float), "calls of different rates are not trained together by a rule"
        rule.step(rows_of(values, rows), rows_of(slots, rows), gradient, rows_of(steps.own, rows), rate, step)
        losses[places] = at_first[0].cpu().to(torch.float64)
    for name, tensor in values.items():
        tensor.sub_(start[name])
    return values, last_epoch_means(to_array(losses), schedule), slots


def step_batches(
    loader: Loader, schedule: BatchSchedule, draws: ForwardDraws, *, batched: bool
) -> Iterator[tuple[int, slice, slice, StepBatch]]:
    """Yield the step, the clients, the places among all batches, and the batch, of all clients or one after another.

    `draws` are seeded for each step of one client; several gradients of a step draw one after the other.
    """
    starts = (np.cumsum(schedule.active) - schedule.active).tolist()
    if batched:
        for step, batch in enumerate(loader.batches(schedule)):
            active = int(schedule.active[step])
            yield step, slice(0, active), slice(starts[step], starts[step] + active), batch
        return
    for client, n_steps in enumerate(schedule.steps.tolist()):
        for step in range(n_steps):
            place = starts[step] + client
            size = int(schedule.sizes[place])
            features, labels = loader.samples(schedule.samples[place, :size])
            weights = torch.full((1, size), 1 / size, device=loader.device, dtype=loader.dtype)
            batch = StepBatch(each_input(_with_client, features), labels.unsqueeze(0), weights)
            draws.seed(client, step)
            yield step, slice(client, client + 1), slice(place, place + 1), batch


def _parts(weights: Tensor, sizes: Tensor, n_parts: int) -> list[Tensor]:
    """Return the weight of each sample in the mean over each part [a, b]; 0 for padding and other parts.

    `weights` [a, b] are those in the mean over the batch.
    """
    valid = weights > 0
    part = torch.arange(valid.shape[1], device=valid.device) * n_parts // sizes.unsqueeze(1)
    found = []
    for index in range(n_parts):
        inside = valid & (part == index)
        found.append(inside.to(weights.dtype) / inside.sum(1, keepdim=True).clamp(min=1))
    return found


def _with_client(values: Tensor) -> Tensor:
    """Return tensors [b, ...] with a client axis, [1, b, ...]."""
    return values.unsqueeze(0)


def _of_client(values: Tensor) -> Tensor:
    return values[0]


def gradient_of_one(module: nn.Module, loss: Loss, frozen: Tensors, steps: Steps) -> ChainGradient:
    """Return the gradient of one client, whose tensors have a leading axis of length 1."""
    kept = {name: tensor[0] for name, tensor in frozen.items()}

    def gradient(
        values: Mapping[str, Tensor], features: Inputs, labels: Tensor, weights: Tensor
    ) -> tuple[Tensors, Tensor]:
        now = {name: tensor[0].detach().requires_grad_() for name, tensor in values.items()}
        parameters = steps.rebuild(now, kept) if steps.rebuild else now
        losses = loss.per_sample(call_module(module, each_input(_of_client, features), parameters), labels[0])
        objective = (losses * weights[0]).sum() + decay_of_rebuilt(parameters, steps)
        gradients = torch.autograd.grad(objective, list(now.values()), materialize_grads=True)
        of_names = zip(now, gradients, strict=True)
        return {name: each.unsqueeze(0) for name, each in of_names}, losses.detach().unsqueeze(0)

    return gradient
