"""Local training of any torch module for all clients of a chunk, batched or client by client.

Both modes take the same steps on the same batches. Batched training stacks the clients' parameters along a leading axis
and is faster if the work per client is small. Client-by-client training is for modules that cannot be batched and for
convolutions, which do not gain from batching.

Mean loss of each client of a chunk before training: one forward pass over all of its samples.

The parameters of each client of a chunk before training, and the samples that they are measured on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, reduce

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from narrowcast.algorithms.local_training.batches import BatchSchedule
from narrowcast.algorithms.local_training.forward_draws import NO_DRAWS, ForwardDraws
from narrowcast.algorithms.local_training.gradients import (
    ARRAY_TYPES,
    ChainGradient,
    Device,
    Tensors,
    batched_attention,
    batched_forward,
    callable_of,
    chain_gradient,
    float32_products,
    records_graph,
    sample_losses,
    to_array,
    to_tensor,
)
from narrowcast.algorithms.local_training.local_optimizer import (
    GradientDescent,
    LocalOptimizer,
    OptimizerState,
    Rate,
    along,
)
from narrowcast.platform.data.samples import Labelled, each_input
from narrowcast.platform.models.measures import Loss
from narrowcast.platform.models.module_call import Inputs, call_module, has_half_types
from narrowcast.platform.models.modules import copy_of, fixed_of, trained_of, with_values
from narrowcast.platform.models.neural_network import as_input, as_target
from narrowcast.platform.types import FloatArray, IntArray, Rebuild


@dataclass(frozen=True)
class Steps:
    """Parameters of a client's steps, taken in the order of torch's optimisers.

    `optimizer` takes them with g + weight_decay y + correction. g is the gradient of the loss, multiplied by `gains`
    [C, ...], plus that of the proximal term, clipped to a norm. `correction` is [C, ...]. `rebuild` computes the
    module's parameters from the trained values and `frozen` [1 or C, ...]. A learning rate is a scalar or [C]; there is
    one for each step, or one for all. `own` [C, ...] is for a rule that replaces the optimizer. `draws` are those
    of the module, and `statistics` the names of what its steps move besides the parameters.
    """

    learning_rates: Sequence[Rate]
    optimizer: LocalOptimizer = field(default_factory=GradientDescent)
    weight_decay: float = 0.0
    clip_norm: float | None = None
    proximal: float = 0.0
    gains: Tensors = field(default_factory=dict)
    correction: Tensors = field(default_factory=dict)
    rebuild: Rebuild | None = None
    frozen: Tensors = field(default_factory=dict)
    own: Tensors = field(default_factory=dict)
    draws: ForwardDraws = NO_DRAWS
    statistics: tuple[str, ...] = ()

    def learning_rate(self, step: int) -> Rate:
        """Return the learning rate of a step."""
        return self.learning_rates[min(step, len(self.learning_rates) - 1)]

    @cached_property
    def plain(self) -> bool:
        """Return whether a step is the gradient of the loss and nothing else."""
        terms = (self.weight_decay, self.clip_norm, self.proximal, self.gains, self.correction)
        return self.optimizer == GradientDescent() and not any(terms)


@dataclass(frozen=True)
class StepBatch:
    """One step of the first `len(labels)` clients.

    Shapes: features [a, b, ...] each; labels [a, b, ...]; weights [a, b], a sample's share of the batch's mean, 0 for
    padding.
    """

    features: Inputs
    labels: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Loader:
    """Loads samples onto the device.

    `rows` lists the rows of `data` of each client in turn, in the order of the schedule. `dtype` is that of the
    parameters.
    """

    data: Labelled
    rows: IntArray
    device: Device
    dtype: torch.dtype = torch.float32

    def samples(self, indices: IntArray) -> tuple[Inputs, Tensor]:
        """Return the features and labels of the samples at these indices of `rows`."""
        rows = self.rows[indices]
        return self._inputs(rows), as_target(to_tensor(self.data.labels[rows], self.device), self.dtype)

    def batches(self, schedule: BatchSchedule) -> Iterator[StepBatch]:
        """Yield the batch of each step; padding repeats a sample and has no weight."""
        rows = self.rows.take(np.where(schedule.valid, schedule.samples, 0))
        labels = as_target(to_tensor(self.data.labels.take(rows, axis=0), self.device), self.dtype)
        shares = np.divide(schedule.valid, schedule.sizes[:, None], dtype=ARRAY_TYPES[self.dtype])
        weights = to_tensor(shares, self.device)
        start = 0
        for n_clients in schedule.active.tolist():
            batches = slice(start, start + n_clients)
            yield StepBatch(self._inputs(rows[batches]), labels[batches], weights[batches])
            start += n_clients

    def _inputs(self, rows: IntArray) -> Inputs:
        return each_input(
            lambda values: as_input(to_tensor(values.take(rows, axis=0), self.device), self.dtype), self.data.features
        )


def train_network(
    module: nn.Module,
    loss: Loss,
    start: Tensors,
    loader: Loader,
    schedule: BatchSchedule,
    steps: Steps,
    *,
    batched: bool,
) -> tuple[Tensors, FloatArray]:
    """Train every client on the loss; return the change of each tensor [C, ...] and its mean in the last epoch [C].

    Each tensor of `start` is [1, ...] if all clients start alike, else [C, ...]; all client axes are in the order of
    `schedule`.
    """
    train = _train_batched if batched else _train_each
    graph = not batched or steps.rebuild or records_graph(module, loss)
    with float32_products(loader.device), nullcontext() if graph else torch.inference_mode():
        values = {name: tensor.clone() for name, tensor in of_each_client(start, len(schedule.order)).items()}
        losses = train(module, loss, start, values, loader, schedule, steps)
        for name, tensor in values.items():
            tensor.sub_(start[name])
    return values, last_epoch_means(losses, schedule)


def last_epoch_means(losses: FloatArray, schedule: BatchSchedule) -> FloatArray:
    """Return each client's mean loss [C] over the samples of its last epoch, from the mean of every batch [B]."""
    active, n_clients = schedule.active, len(schedule.order)
    client = np.arange(len(losses)) - (active.cumsum() - active).repeat(active)
    sizes = schedule.sizes
    if schedule.first_of_last_epoch.any():
        counts = np.repeat(np.arange(len(active)), active) >= schedule.first_of_last_epoch[client]
        client, losses, sizes = client[counts], losses[counts], sizes[counts]
    totals = np.bincount(client, weights=losses * sizes, minlength=n_clients)
    return totals / np.maximum(np.bincount(client, weights=sizes, minlength=n_clients), 1)


def _train_batched(
    module: nn.Module,
    loss: Loss,
    start: Tensors,
    values: Tensors,
    loader: Loader,
    schedule: BatchSchedule,
    steps: Steps,
) -> FloatArray:
    module = callable_of(module, loader.device)
    gradients_of = gradients_of_module(module, loss, len(schedule.order), steps)
    state: OptimizerState = {}
    losses: list[Tensor] = []
    try:
        for step, batch in enumerate(loader.batches(schedule)):
            training = slice(0, batch.labels.shape[0])
            now = rows_of(values, training)
            with batched_attention(loader.device):
                gradients, of_samples = gradients_of(now, batch.features, batch.labels, batch.weights)
            losses.append(of_samples)
            _step(now, start, gradients, state, steps, training, step)
    except (Exception, SystemExit) as error:
        error.add_note(f"step {len(losses) + 1}")
        raise
    if not losses:
        return np.empty(0)
    of_batches = np.where(schedule.valid, to_array(torch.cat(losses)), 0.0)
    return np.asarray(of_batches.sum(axis=1, dtype=np.float64) / schedule.sizes)


def gradients_of_module(module: nn.Module, loss: Loss, n_clients: int, steps: Steps) -> ChainGradient:
    """Return the gradient of the values that clients train, in closed form if the module has one."""
    in_closed_form = None if steps.rebuild else chain_gradient(module, loss)
    return in_closed_form or _recorded(module, loss, n_clients, steps)


SampleLosses = Callable[[Mapping[str, Tensor], Inputs, Tensor], tuple[Tensor, Mapping[str, Tensor]]]
"""Map values [a, ...], features and labels [a, b, ...] of a clients to the losses [a, b] and the parameters."""


def losses_of_module(
    module: nn.Module, loss: Loss, n_clients: int, rebuild: Rebuild | None, frozen: Tensors
) -> SampleLosses:
    """Return the losses of the module, whose parameters `rebuild` computes from trained and `frozen` values."""
    forward, together = batched_forward(module), vmap(rebuild) if rebuild else None
    # A shared tensor would be multiplied as one large product, which rounds differently from those of replicas.
    fixed = of_each_client(frozen, n_clients)

    def losses(values: Mapping[str, Tensor], features: Inputs, labels: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        parameters = together(values, rows_of(fixed, slice(0, len(labels)))) if together else values
        return sample_losses(loss, forward(parameters, features), labels), parameters

    return losses


def of_each_client(tensors: Tensors, n_clients: int) -> Tensors:
    """Return views [C, ...] of tensors [1 or C, ...]."""
    return {name: tensor.expand(n_clients, *tensor.shape[1:]) for name, tensor in tensors.items()}


def _recorded(module: nn.Module, loss: Loss, n_clients: int, steps: Steps) -> ChainGradient:
    """Return the gradient of any module, by torch's autograd; the parameters are those that clients train."""
    losses_of = losses_of_module(module, loss, n_clients, steps.rebuild, steps.frozen)

    def gradient(
        values: Mapping[str, Tensor], features: Inputs, labels: Tensor, weights: Tensor
    ) -> tuple[Tensors, Tensor]:
        now = {name: tensor.detach().requires_grad_() for name, tensor in values.items()}
        losses, parameters = losses_of(now, features, labels)
        objective = (losses * weights).sum() + decay_of_rebuilt(parameters, steps)
        gradients = torch.autograd.grad(objective, list(now.values()), materialize_grads=True)
        return dict(zip(now, gradients, strict=True)), losses.detach()

    return gradient


def _train_each(
    module: nn.Module,
    loss: Loss,
    start: Tensors,
    values: Tensors,
    loader: Loader,
    schedule: BatchSchedule,
    steps: Steps,
) -> FloatArray:
    step_starts = np.cumsum(schedule.active) - schedule.active
    losses = torch.zeros(int(schedule.active.sum()), device=loader.device, dtype=loader.dtype)
    # Values put into a copy are faster than values supplied with every call.
    own_module = copy_of(module, loader.device, own=steps.statistics)
    moved = {name: fixed_of(own_module)[name].clone() for name in steps.statistics}
    for parameter in trained_of(own_module).values():
        parameter.data = _channels_last(parameter.data)
    supplied = steps.rebuild is not None or has_half_types(own_module)
    for client, n_steps in enumerate(schedule.steps):
        state: OptimizerState = {}
        client_row = slice(client, client + 1)
        begin, frozen = (
            rows_of(start, client_row),
            {name: values[0] for name, values in rows_of(steps.frozen, client_row).items()},
        )
        leaves: Tensors
        if supplied:
            trained = begin if steps.rebuild else trained_of(own_module)
            leaves = {name: _channels_last(begin[name][0]).requires_grad_() for name in trained}
        else:
            leaves = dict(trained_of(own_module))
            torch._foreach_copy_([leaf.detach() for leaf in leaves.values()], [begin[name][0] for name in leaves])
        now = {name: leaf.detach().unsqueeze(0) for name, leaf in leaves.items()}
        with_values(own_module, {name: begin[name][0] if name in begin else tensor for name, tensor in moved.items()})
        step = 0
        try:
            for step in range(n_steps):
                batch = int(step_starts[step]) + client
                features, labels = loader.samples(schedule.samples[batch, : schedule.sizes[batch]])
                features = each_input(_channels_last, features)
                parameters = steps.rebuild(leaves, frozen) if steps.rebuild else leaves
                steps.draws.seed(client, step)
                outputs = call_module(own_module, features, parameters if supplied else None)
                mean = loss.per_sample(outputs, labels).mean()
                losses[batch] = mean.detach()
                objective = mean + decay_of_rebuilt(parameters, steps)
                gradients = torch.autograd.grad(objective, list(leaves.values()), materialize_grads=True)
                rows = {name: gradient.unsqueeze(0) for name, gradient in zip(leaves, gradients, strict=True)}
                _step(now, begin, rows, state, steps, client_row, step)
        except (Exception, SystemExit) as error:
            error.add_note(f"step {step + 1}")
            raise
        for name, tensor in now.items():
            values[name][client] = tensor[0]
        for name, tensor in fixed_of(own_module).items() if steps.statistics else ():
            if name in values:
                values[name][client] = tensor
    return to_array(losses).astype(np.float64)


def rows_of(tensors: Tensors, rows: slice) -> Tensors:
    """Return the rows of some clients; a tensor that all clients share has one row and is returned whole."""
    whole = (1, rows.stop - rows.start)
    return {name: tensor if tensor.shape[0] in whole else tensor[rows] for name, tensor in tensors.items()}


def _channels_last(tensor: Tensor) -> Tensor:
    """Return a copy with the channels of images and convolutions innermost, which runs a third faster on a CPU."""
    return tensor.clone(memory_format=torch.channels_last if tensor.ndim == 4 else torch.contiguous_format)


def decay_of_rebuilt(parameters: Mapping[str, Tensor], steps: Steps) -> Tensor | float:
    """Return weight decay as a term of the objective, used if the decayed parameters are not themselves trained."""
    if not (steps.weight_decay and steps.rebuild):
        return 0.0
    return steps.weight_decay / 2 * torch.stack([values.square().sum() for values in parameters.values()]).sum()


def _step(
    values: Tensors,
    start: Tensors,
    gradients: Tensors,
    state: OptimizerState,
    steps: Steps,
    rows: slice,
    step: int,
) -> None:
    """Move the values [a, ...] of the clients `rows` by one step, in place; `start` is [1 or C, ...]."""
    rate = steps.learning_rate(step)
    if isinstance(rate, float) and steps.plain:
        torch._foreach_sub_([values[name] for name in gradients], list(gradients.values()), alpha=rate)
        return
    add_terms(values, start, gradients, steps, rows)
    steps.optimizer.move(values, gradients, state, rate if isinstance(rate, float) else rate[rows], step)


def add_terms(values: Tensors, start: Tensors, gradients: Tensors, steps: Steps, rows: slice) -> None:
    """Add all terms but momentum to gradients [a, ...] of the loss at `values`, in place; `start` is [1 or C, ...]."""
    for name, gradient in gradients.items():
        if name in steps.gains:
            gradient.mul_(steps.gains[name][rows])
        if steps.proximal:
            gradient.add_(values[name] - rows_of(start, rows)[name], alpha=steps.proximal)
    if steps.clip_norm is not None:
        count = rows.stop - rows.start
        squares = [gradient.reshape(count, -1).square().sum(dim=1) for gradient in gradients.values()]
        # in turn: the rounding of torch's sum over many tensors depends on the number of clients in the batch
        scale = (steps.clip_norm / reduce(torch.add, squares).sqrt().clamp(min=1e-12)).clamp(max=1.0)
        for gradient in gradients.values():
            gradient.mul_(along(scale, gradient))
    for name, gradient in gradients.items():
        if steps.weight_decay and not steps.rebuild:
            gradient.add_(values[name], alpha=steps.weight_decay)
        if name in steps.correction:
            gradient.add_(steps.correction[name][rows])


@dataclass(frozen=True)
class StartPoint:
    """The values from which clients train, and all samples of each client, as a schedule of one epoch.

    Each tensor of `values` and `frozen` is [1, ...] if all clients have the same, else [C, ...]; all client axes are in
    the order of `schedule`. `rebuild` computes the module's parameters from both. `batched`: all clients at once.
    `draws` are those of the passes.
    """

    module: nn.Module
    loss: Loss
    values: Tensors
    loader: Loader
    schedule: BatchSchedule
    rebuild: Rebuild | None
    frozen: Tensors
    batched: bool
    draws: ForwardDraws


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
        client_row = slice(client, client + 1)
        now, frozen = (
            {name: rows[0] for name, rows in rows_of(tensors, client_row).items()}
            for tensors in (point.values, point.frozen)
        )
        parameters = point.rebuild(now, frozen) if point.rebuild else now
        for step in range(n_steps):
            batch = int(step_starts[step]) + client
            features, labels = point.loader.samples(schedule.samples[batch, : schedule.sizes[batch]])
            point.draws.seed(client, step)
            outputs = call_module(module, features, parameters)
            losses[batch] = float(point.loss.per_sample(outputs, labels).mean())
    return losses
