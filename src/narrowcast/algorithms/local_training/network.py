"""Local training of any torch module: one loop over steps, of all clients of a chunk at once or of one after another.

Both executions take the same steps on the same batches. At once, the clients' parameters are stacked along a leading
axis, which is faster if the work per client is small. One after another is for modules that cannot be batched and for
convolutions, which do not gain from it. What a step does is a rule's: `narrowcast.algorithms.local_training.rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from narrowcast.algorithms.local_training.batches import BatchSchedule
from narrowcast.algorithms.local_training.consistency import SoftCrossEntropy, UnlabelledBatches, UnlabelledGradient
from narrowcast.algorithms.local_training.forward_draws import NO_DRAWS, ForwardDraws
from narrowcast.algorithms.local_training.gradients import (
    ARRAY_TYPES,
    Device,
    StepGradient,
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
from narrowcast.algorithms.local_training.rules import Optimizer, along
from narrowcast.algorithms.local_training.steps import Steps, add_terms, move_back, rows_of
from narrowcast.platform.data.samples import Labelled, each_input
from narrowcast.platform.models.measures import Loss
from narrowcast.platform.models.module_call import Inputs, call_module, has_half_types
from narrowcast.platform.models.modules import copy_of, fixed_of, trained_of, with_values
from narrowcast.platform.models.neural_network import as_input, as_target
from narrowcast.platform.types import FloatArray, IntArray, Rebuild

_SOFT = SoftCrossEntropy()


@dataclass(frozen=True)
class StepBatch:
    """One step of the first `len(labels)` clients, or of one client.

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


OutputsOf = Callable[[Tensors, Inputs], tuple[Tensor, Mapping[str, Tensor]]]
"""Map trained values and features to the module's outputs and its parameters: of a clients [a, ...], or of one without
its axis."""


@dataclass(frozen=True)
class Recorded:
    """Derivatives of each client's weighted sum of losses by torch's autograd.

    `leaves_of` maps values [a, ...] to tensors of which `outputs_of` is a differentiable function, without the axis of
    clients unless they are `batched`. `decay` is that of the module's parameters, if these are not what trains.
    """

    outputs_of: OutputsOf
    loss: Loss
    leaves_of: Callable[[Mapping[str, Tensor]], Tensors]
    device: Device
    batched: bool
    decay: float

    def __call__(
        self, values: Mapping[str, Tensor], features: Inputs, labels: Tensor, weights: Tensor
    ) -> tuple[Tensors, Tensor]:
        """Return the gradient [a, ...], and the losses [a, b]."""
        leaves = self.leaves_of(values)
        with self._attention():
            objective, losses = self._objective(leaves, features, labels, weights)
            slopes = torch.autograd.grad(objective, list(leaves.values()), materialize_grads=True)
        return self._of_clients(leaves, slopes), losses.detach() if self.batched else losses.detach().unsqueeze(0)

    def losses(self, values: Mapping[str, Tensor], features: Inputs, labels: Tensor) -> Tensor:
        """Return the losses of samples, [a, b] or of one client [b]."""
        return self._losses(self.outputs_of(self.leaves_of(values), features)[0], labels)

    def outputs(self, values: Mapping[str, Tensor], features: Inputs) -> Tensor:
        """Return the outputs for samples, [a, b, ...], without a graph."""
        with torch.no_grad():
            outputs, _ = self.outputs_of(self.leaves_of(values), features)
        return outputs if self.batched else outputs.unsqueeze(0)

    def hessian_product(
        self,
        values: Mapping[str, Tensor],
        direction: Mapping[str, Tensor],
        features: Inputs,
        labels: Tensor,
        weights: Tensor,
    ) -> Tensors:
        """Return the gradient of the gradient's product with a direction [a, ...]."""
        leaves = self.leaves_of(values)
        with self._attention():
            objective, _ = self._objective(leaves, features, labels, weights)
            slopes = torch.autograd.grad(
                objective, list(leaves.values()), create_graph=True, allow_unused=True, materialize_grads=True
            )
            parts = [direction[name] if self.batched else direction[name][0] for name in leaves]
            product = torch.stack([(slope * part).sum() for slope, part in zip(slopes, parts, strict=True)]).sum()
            if product.requires_grad:
                slopes = torch.autograd.grad(product, list(leaves.values()), allow_unused=True, materialize_grads=True)
            else:  # the loss is linear
                slopes = tuple(torch.zeros_like(leaf) for leaf in leaves.values())
        return self._of_clients(leaves, slopes)

    def _objective(self, leaves: Tensors, features: Inputs, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        outputs, parameters = self.outputs_of(leaves, features)
        losses = self._losses(outputs, labels)
        objective = (losses * weights).sum()
        if self.decay:
            squares = torch.stack([tensor.square().sum() for tensor in parameters.values()])
            objective = objective + self.decay / 2 * squares.sum()
        return objective, losses

    def _losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return sample_losses(self.loss, outputs, labels) if self.batched else self.loss.per_sample(outputs, labels[0])

    def _of_clients(self, leaves: Tensors, slopes: Sequence[Tensor]) -> Tensors:
        return {name: part if self.batched else part.unsqueeze(0) for name, part in zip(leaves, slopes, strict=True)}

    def _attention(self) -> AbstractContextManager[None]:
        return batched_attention(self.device) if self.batched else nullcontext()


@dataclass(frozen=True)
class ClientStep:
    """Step `index` of the clients at `rows` of a program, on the batches at `batches` among all.

    Shapes: values [a, ...], the clients' own memory. `gradient` is that of the weighted sum of losses, `recorded` or in
    closed form; `of_unlabelled` is that of the cross-entropy with shares of the classes, if the program has samples
    without labels.
    """

    index: int
    rows: slice
    batches: slice
    batch: StepBatch
    values: Tensors
    recorded: Recorded
    gradient: StepGradient
    of_unlabelled: StepGradient | None = None


@dataclass(frozen=True)
class Program:
    """The clients of a chunk with their network, batches and start, trained at once if `batched`, else in turn.

    Each tensor of `start`, `fixed` and `frozen` is [1, ...] if all clients have the same, else [C, ...]; client axes
    are in the order of `schedule`. `start` is what trains, and `fixed` the other parameters. `rebuild` computes the
    module's parameters from both and `frozen`. `draws` are those of the module, and `statistics` the names of what its
    passes move besides the parameters. `unlabelled` are samples without labels, whose loss is added to that of each
    step; without `labels` it is the whole loss.
    """

    module: nn.Module
    loss: Loss
    loader: Loader
    schedule: BatchSchedule
    start: Tensors
    batched: bool
    fixed: Tensors = field(default_factory=dict)
    rebuild: Rebuild | None = None
    frozen: Tensors = field(default_factory=dict)
    draws: ForwardDraws = NO_DRAWS
    statistics: tuple[str, ...] = ()
    unlabelled: UnlabelledBatches | None = None
    labels: bool = True

    @property
    def n_clients(self) -> int:
        """The number of clients, C."""
        return len(self.schedule.order)

    @property
    def in_closed_form(self) -> bool:
        """Return whether gradients are those of a chain, if the module is one."""
        return self.batched and self.rebuild is None and not self.fixed

    def steps(self, values: Tensors, weight_decay: float = 0.0, *, moves: bool = False) -> Iterator[ClientStep]:
        """Yield every step of every client from `values` [1 or C, ...], which the caller may change if it `moves`."""
        if self.batched:
            return self._at_once(of_each_client(values, self.n_clients), weight_decay)
        return self._in_turn(values, weight_decay, moves=moves)

    def _at_once(self, values: Tensors, weight_decay: float) -> Iterator[ClientStep]:
        module = callable_of(self.module, self.loader.device)
        forward, together = batched_forward(module), vmap(self.rebuild) if self.rebuild else None
        # A shared tensor would be multiplied as one large product, which rounds differently from those of replicas.
        fixed, frozen = (of_each_client(tensors, self.n_clients) for tensors in (self.fixed, self.frozen))

        def outputs(now: Tensors, features: Inputs) -> tuple[Tensor, Mapping[str, Tensor]]:
            rows = slice(0, len(next(iter(now.values()))))
            parameters: Mapping[str, Tensor] = {**rows_of(fixed, rows), **now}
            if together:
                parameters = together(parameters, rows_of(frozen, rows))
            return forward(parameters, features), parameters

        recorded = self._recorded(outputs, _detached, weight_decay)
        gradient = self._gradient(recorded)
        of_unlabelled = self._of_unlabelled(recorded)
        stop = 0
        for index, batch in enumerate(self.loader.batches(self.schedule)):
            rows, start = slice(0, len(batch.labels)), stop
            stop += rows.stop
            now = rows_of(values, rows)
            yield ClientStep(index, rows, slice(start, stop), batch, now, recorded, gradient, of_unlabelled)

    def _in_turn(self, values: Tensors, weight_decay: float, *, moves: bool) -> Iterator[ClientStep]:
        schedule, loader = self.schedule, self.loader
        first_batches = (np.cumsum(schedule.active) - schedule.active).tolist()
        # Values put into a copy are faster than values supplied with every call.
        module = copy_of(self.module, loader.device, own=self.statistics)
        statistics = {name: fixed_of(module)[name].clone() for name in self.statistics}
        trained = trained_of(module)
        for parameter in trained.values():
            parameter.data = _channels_last(parameter.data)
        supplied = self.rebuild is not None or has_half_types(module)
        names = list(values) if self.rebuild else [name for name in trained if name in values]
        for client, n_steps in enumerate(schedule.steps.tolist()):
            row = slice(client, client + 1)
            begin, fixed, frozen = (
                {name: tensor[0] for name, tensor in rows_of(tensors, row).items()}
                for tensors in (values, self.fixed, self.frozen)
            )
            inside = {} if supplied else {name: trained[name] for name in names}
            held = {**fixed, **begin}
            with_values(module, {name: held.get(name, tensor) for name, tensor in statistics.items()})
            if supplied:
                own: Tensors = {name: _channels_last(begin[name]) for name in names}
            else:
                own = dict(inside)
                with_values(module, {name: tensor for name, tensor in held.items() if name not in statistics})
            now = {name: tensor.detach().unsqueeze(0) for name, tensor in own.items()}

            def leaves(at: Mapping[str, Tensor], now: Tensors = now, inside: Mapping[str, Tensor] = inside) -> Tensors:
                if at is now and inside:
                    return dict(inside)
                return {name: _channels_last(tensor[0]).requires_grad_() for name, tensor in at.items()}

            def outputs(
                now: Tensors,
                features: Inputs,
                inside: Mapping[str, Tensor] = inside,
                fixed: Tensors = fixed,
                frozen: Tensors = frozen,
            ) -> tuple[Tensor, Mapping[str, Tensor]]:
                parameters: Mapping[str, Tensor] = {**fixed, **now}
                if self.rebuild:
                    parameters = self.rebuild(parameters, frozen)
                its_own = all(now[name] is inside.get(name) for name in now)
                return call_module(module, each_input(_first, features), None if its_own else parameters), parameters

            recorded = self._recorded(outputs, leaves, weight_decay)
            of_unlabelled = self._of_unlabelled(recorded)
            for step in range(n_steps):
                index = first_batches[step] + client
                size = int(schedule.sizes[index])
                features, labels = loader.samples(schedule.samples[index, :size])
                inputs = each_input(lambda part: _channels_last(part).unsqueeze(0), features)
                weights = torch.full((1, size), 1 / size, device=loader.device, dtype=loader.dtype)
                batch = StepBatch(inputs, labels.unsqueeze(0), weights)
                self.draws.seed(client, step)
                yield ClientStep(step, row, slice(index, index + 1), batch, now, recorded, recorded, of_unlabelled)
            if moves:
                buffers = fixed_of(module) if statistics else {}
                ended = {**{name: buffers[name] for name in statistics}, **{name: now[name][0] for name in now}}
                for name in values.keys() & ended.keys():
                    values[name][client] = ended[name]

    def _gradient(self, recorded: Recorded) -> StepGradient:
        return (chain_gradient(self.module, recorded.loss) if self.in_closed_form else None) or recorded

    def _of_unlabelled(self, recorded: Recorded) -> StepGradient | None:
        """Return the gradient of samples without labels; None if there are none."""
        if self.unlabelled is None:
            return None
        return self._gradient(replace(recorded, loss=_SOFT, decay=0.0 if self.labels else recorded.decay))

    def _recorded(
        self, outputs_of: OutputsOf, leaves_of: Callable[[Mapping[str, Tensor]], Tensors], weight_decay: float
    ) -> Recorded:
        decay = weight_decay if self.rebuild else 0.0
        return Recorded(outputs_of, self.loss, leaves_of, self.loader.device, self.batched, decay)


def train(program: Program, steps: Steps) -> tuple[Tensors, FloatArray, Tensors]:
    """Train every client; return the changes [C, ...], the mean loss in its last epoch [C], and the rule's slots.

    Slots [C, ...] are those of a rule of an algorithm: what an optimizer keeps is dropped.
    """
    rule, start, loader = steps.rule, program.start, program.loader
    keeps = not isinstance(rule, Optimizer)
    closed = program.in_closed_form and program.unlabelled is None
    graph = keeps or not closed or records_graph(program.module, program.loss)
    with float32_products(loader.device), nullcontext() if graph else torch.inference_mode():
        values = {name: tensor.clone() for name, tensor in of_each_client(start, program.n_clients).items()}
        slots = rule.init({name: tensor.clone() for name, tensor in values.items()}, steps.own) if keeps else {}
        losses = torch.zeros(program.schedule.valid.shape, dtype=loader.dtype, device=loader.device)
        step, number = None, 0
        try:
            for step in program.steps(values, steps.weight_decay, moves=True):
                number = step.index
                if not (keeps or step.index):
                    slots = rule.init(step.values, {})
                gradient = _Gradient(program, steps, step)
                rate: Any = steps.learning_rate(step.index, step.rows)
                own = rows_of(steps.own, step.rows)
                rule.step(step.values, rows_of(slots, step.rows), gradient, own, rate, step.index)
                if steps.radii is not None:
                    move_back(step.values, rows_of(start, step.rows), steps.radii[step.rows])
                assert gradient.losses is not None, "a step takes the gradient once at least"
                losses[step.batches, : gradient.losses.shape[1]] = gradient.losses
                number = step.index + 1
        except (Exception, SystemExit) as error:
            error.add_note(f"step {number + 1}")
            raise
        for name, tensor in values.items():
            tensor.sub_(start[name])
    totals = np.where(program.schedule.valid, to_array(losses), 0.0).sum(axis=1, dtype=np.float64)
    means = last_epoch_means(totals / program.schedule.sizes, program.schedule)
    return values, means, slots if keeps else {}


class _Gradient:
    """`Gradient` of a step; `losses` [a, b] are those at the first values."""

    def __init__(self, program: Program, steps: Steps, step: ClientStep) -> None:
        self._program, self._steps, self._step = program, steps, step
        self.losses: Tensor | None = None

    def __call__(self, at: Mapping[str, Tensor], part: int) -> Tensors:
        step, steps = self._step, self._steps
        if self._program.labels:
            gradients, losses = step.gradient(at, step.batch.features, step.batch.labels, self._weights(part))
        else:
            gradients, losses = {name: torch.zeros_like(values) for name, values in at.items()}, step.batch.weights * 0
        unlabelled = self._program.unlabelled
        if unlabelled is not None and unlabelled.consistency.weight:
            losses = self._add_consistency(at, gradients, losses, unlabelled)
        self._saw(losses)
        if not steps.plain:
            decay = 0.0 if self._program.rebuild else steps.weight_decay
            add_terms(at, self._program.start, gradients, steps, step.rows, decay)
        return gradients

    @property
    def unlabelled(self) -> UnlabelledGradient | None:
        step, samples = self._step, self._program.unlabelled
        batch = None if samples is None else samples.at(step.index, step.rows)
        if batch is None or step.of_unlabelled is None:
            return None
        return UnlabelledGradient(batch, step.recorded.outputs, step.of_unlabelled, self._saw)

    def _saw(self, losses: Tensor) -> None:
        if self.losses is None:
            self.losses = losses

    def hessian_product(self, at: Mapping[str, Tensor], part: int, direction: Mapping[str, Tensor]) -> Tensors:
        batch, steps, rows = self._step.batch, self._steps, self._step.rows
        products = self._step.recorded.hessian_product(at, direction, batch.features, batch.labels, self._weights(part))
        decay = 0.0 if self._program.rebuild else steps.weight_decay
        for name, product in products.items():
            if name in steps.gains:
                product.mul_(steps.gains[name][rows])
            product.add_(direction[name], alpha=steps.proximal + decay)
            if steps.pulls is not None:
                product.addcmul_(along(steps.pulls[rows].to(product.dtype), product), direction[name])
        return products

    def _add_consistency(
        self, at: Mapping[str, Tensor], gradients: Tensors, losses: Tensor, unlabelled: UnlabelledBatches
    ) -> Tensor:
        """Add the gradient of the loss of samples without labels, in place; return the losses of the step's samples."""
        step, consistency = self._step, unlabelled.consistency
        batch = unlabelled.at(step.index, step.rows)
        if batch is None or step.of_unlabelled is None:
            return losses
        targets, counts = consistency.targets(step.recorded.outputs(at, batch.weak))
        added, of_samples = step.of_unlabelled(at, batch.strong, targets, batch.weights * counts)
        for name, gradient in added.items():
            gradients[name].add_(gradient, alpha=consistency.weight)
        return losses if self._program.labels else consistency.weight * of_samples * counts

    def _weights(self, part: int) -> Tensor:
        """Return the weight of each sample in the mean over a part [a, b]; 0 for padding and other parts."""
        weights, n_parts = self._step.batch.weights, self._steps.rule.parts
        if n_parts == 1:
            return weights
        sizes = to_tensor(self._program.schedule.sizes[self._step.batches], self._program.loader.device)
        parts = torch.arange(weights.shape[1], device=weights.device) * n_parts // sizes.unsqueeze(1)
        inside = (weights > 0) & (parts == part)
        return inside.to(weights.dtype) / inside.sum(1, keepdim=True).clamp(min=1)


def mean_losses(program: Program) -> FloatArray:
    """Return the mean loss [C] of each client's start over its samples; the schedule is one epoch."""
    losses = torch.zeros(len(program.schedule.valid), dtype=program.loader.dtype, device=program.loader.device)
    with torch.no_grad(), float32_products(program.loader.device):
        for step in program.steps(program.start):
            of_samples = step.recorded.losses(step.values, step.batch.features, step.batch.labels)
            losses[step.batches] = (of_samples * step.batch.weights).sum(1)
    return last_epoch_means(to_array(losses).astype(np.float64), program.schedule)


def mean_gradients(program: Program) -> Tensors:
    """Return the gradient [C, ...] of each client's mean loss over its samples, at its start."""
    loader, start = program.loader, of_each_client(program.start, program.n_clients)
    total = {name: torch.zeros_like(tensor, memory_format=torch.contiguous_format) for name, tensor in start.items()}
    # Batches of a client differ in size, so that the mean over its samples weighs them by theirs.
    samples = torch.zeros(program.n_clients, dtype=loader.dtype, device=loader.device)
    with float32_products(loader.device):
        for step in program.steps(program.start):
            sizes = to_tensor(program.schedule.sizes[step.batches], loader.device).to(loader.dtype)
            weights = step.batch.weights * sizes.unsqueeze(1)
            gradients, _ = step.gradient(step.values, step.batch.features, step.batch.labels, weights)
            samples[step.rows] += sizes
            for name, gradient in gradients.items():
                total[name][step.rows] += gradient
    for tensor in total.values():
        tensor.div_(along(samples.clamp(min=1), tensor))
    return total


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


def of_each_client(tensors: Tensors, n_clients: int) -> Tensors:
    """Return views [C, ...] of tensors [1 or C, ...]."""
    return {
        name: tensor if tensor.shape[0] == n_clients else tensor.expand(n_clients, *tensor.shape[1:])
        for name, tensor in tensors.items()
    }


def _detached(values: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.detach().requires_grad_() for name, tensor in values.items()}


def _first(values: Tensor) -> Tensor:
    return values[0]


def _channels_last(tensor: Tensor) -> Tensor:
    """Return a copy with the channels of images and convolutions innermost, which runs a third faster on a CPU."""
    return tensor.clone(memory_format=torch.channels_last if tensor.ndim == 4 else torch.contiguous_format)
