"""Local steps by a rule of the algorithm, learning rates by round or step, and gradients before training.

Local training by a rule of the algorithm's own in place of gradient descent, batched or client by client.

Learning-rate schedules: the factor of `training.learning_rate` in each round, or at each local step.

Gradient of the mean loss of each client of a chunk before training: one pass over all of its samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Protocol, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from narrowcast.algorithms.local_training.batches import BatchSchedule
from narrowcast.algorithms.local_training.forward_draws import ForwardDraws
from narrowcast.algorithms.local_training.gradients import (
    ChainGradient,
    Tensors,
    callable_of,
    float32_products,
    to_array,
    to_tensor,
)
from narrowcast.algorithms.local_training.network import (
    Loader,
    StartPoint,
    StepBatch,
    Steps,
    add_terms,
    decay_of_rebuilt,
    gradients_of_module,
    last_epoch_means,
    of_each_client,
    rows_of,
)
from narrowcast.platform.config.catalog import LEARNING_RATE_SCHEDULES
from narrowcast.platform.config.fields import ROUNDS
from narrowcast.platform.config.files import Section
from narrowcast.platform.data.samples import each_input
from narrowcast.platform.models.measures import Loss
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
    for step, rows, batches, batch in step_batches(loader, schedule, steps.draws, batched=batched):
        sizes = to_tensor(schedule.sizes[batches], loader.device)
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
        losses[batches] = at_first[0].cpu().to(torch.float64)
    for name, tensor in values.items():
        tensor.sub_(start[name])
    return values, last_epoch_means(to_array(losses), schedule), slots


def step_batches(
    loader: Loader, schedule: BatchSchedule, draws: ForwardDraws, *, batched: bool
) -> Iterator[tuple[int, slice, slice, StepBatch]]:
    """Yield the step, the clients, the indices among all batches, and the batch, of all clients or one after another.

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
            index = starts[step] + client
            size = int(schedule.sizes[index])
            features, labels = loader.samples(schedule.samples[index, :size])
            weights = torch.full((1, size), 1 / size, device=loader.device, dtype=loader.dtype)
            batch = StepBatch(each_input(_with_client, features), labels.unsqueeze(0), weights)
            draws.seed(client, step)
            yield step, slice(client, client + 1), slice(index, index + 1), batch


def _parts(weights: Tensor, sizes: Tensor, n_parts: int) -> list[Tensor]:
    """Return the weight of each sample in the mean over each part [a, b]; 0 for padding and other parts.

    `weights` [a, b] are those in the mean over the batch.
    """
    valid = weights > 0
    part = torch.arange(valid.shape[1], device=valid.device) * n_parts // sizes.unsqueeze(1)
    shares = []
    for index in range(n_parts):
        inside = valid & (part == index)
        shares.append(inside.to(weights.dtype) / inside.sum(1, keepdim=True).clamp(min=1))
    return shares


def _with_client(values: Tensor) -> Tensor:
    """Return tensors [b, ...] with a client axis, [1, b, ...]."""
    return values.unsqueeze(0)


def _of_client(values: Tensor) -> Tensor:
    return values[0]


def gradient_of_one(module: nn.Module, loss: Loss, frozen: Tensors, steps: Steps) -> ChainGradient:
    """Return the gradient of one client, whose tensors have a leading axis of length 1."""
    fixed = {name: tensor[0] for name, tensor in frozen.items()}

    def gradient(
        values: Mapping[str, Tensor], features: Inputs, labels: Tensor, weights: Tensor
    ) -> tuple[Tensors, Tensor]:
        now = {name: tensor[0].detach().requires_grad_() for name, tensor in values.items()}
        parameters = steps.rebuild(now, fixed) if steps.rebuild else now
        losses = loss.per_sample(call_module(module, each_input(_of_client, features), parameters), labels[0])
        objective = (losses * weights[0]).sum() + decay_of_rebuilt(parameters, steps)
        gradients = torch.autograd.grad(objective, list(now.values()), materialize_grads=True)
        of_names = zip(now, gradients, strict=True)
        return {name: part.unsqueeze(0) for name, part in of_names}, losses.detach().unsqueeze(0)

    return gradient


BY_ROUND_ADVICE = "use constant, step, milestones or cosine, or warmup over rounds"
"""The advice where a schedule changes within a round, and the training or the algorithm cannot."""


class LearningRateSchedule(Protocol):
    """A frozen model of how the learning rate of local training changes; the same on every client and host."""

    @property
    def kind(self) -> str:
        """The schedule's name in the catalog."""
        ...

    @property
    def by_step(self) -> bool:
        """True if the factor changes within a round; only neural networks are trained with such a schedule."""
        ...

    def factor(self, round_index: int, step: int) -> float:
        """Return the factor, above 0, of the learning rate; depends on the arguments alone.

        `round_index` is 1 in the first round. `step` is the number of local steps before this one since round 1, of a
        client that takes part in every round and has as many examples as the largest one.
        """
        ...


class _ByRound(Section):
    by_step: ClassVar[bool] = False


class Constant(_ByRound):
    """The learning rate of the training in all rounds."""

    kind: Literal["constant"] = "constant"

    def factor(self, round_index: int, step: int) -> float:
        """Return 1."""
        del round_index, step
        return 1.0


class StepDecay(_ByRound):
    """The learning rate is multiplied by `decay` after every `every` rounds."""

    kind: Literal["step"] = "step"
    every: int = Field(ge=1, description="rounds with the same learning rate", json_schema_extra=ROUNDS)
    decay: float = Field(0.5, gt=0, description="factor of the learning rate after these rounds")

    def factor(self, round_index: int, step: int) -> float:
        """Return decay^floor((round_index - 1) / every)."""
        del step
        return float(self.decay ** ((round_index - 1) // self.every))


class Milestones(_ByRound):
    """The learning rate is multiplied by `decay` after each of some rounds."""

    kind: Literal["milestones"] = "milestones"
    rounds: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1, description="last rounds before each change")
    decay: float = Field(0.1, gt=0, description="factor of the learning rate at each change")

    def factor(self, round_index: int, step: int) -> float:
        """Return decay^k, k the number of milestones before this round."""
        del step
        return float(self.decay ** sum(milestone < round_index for milestone in self.rounds))


class Cosine(_ByRound):
    """The learning rate falls along half a cosine from its value in round 1 to a share of it, and stays there.

    Reference: Loshchilov and Hutter, SGDR, ICLR 2017 (arXiv:1608.03983), equation 5, without restarts.
    """

    kind: Literal["cosine"] = "cosine"
    rounds: int = Field(ge=1, description="rounds over which it falls", json_schema_extra=ROUNDS)
    final_share: float = Field(0.01, gt=0, le=1, description="share of the learning rate that remains afterwards")

    def factor(self, round_index: int, step: int) -> float:
        """Return s + (1 - s) (1 + cos(pi t)) / 2, where t = (round_index - 1) / rounds, at most 1."""
        del step
        progress = min((round_index - 1) / self.rounds, 1.0)
        return self.final_share + (1 - self.final_share) * (1 + math.cos(math.pi * progress)) / 2


class InverseTime(Section):
    """s_t = 2 / (alpha (gamma + t)); t counts local steps, and is 1 at the first step of round 1.

    With `training.learning_rate: 1` s_t is the rate of FedAvg's convergence theorem for alpha-strongly convex and
    beta-smooth objectives, with gamma = max(8 beta / alpha, E) and E local steps a round; the rate falls within a round
    too. If clients take different numbers of steps, every round counts those of the client with most examples.

    Reference: Li et al., On the Convergence of FedAvg on Non-IID Data, ICLR 2020 (arXiv:1907.02189), Theorem 1.
    """

    by_step: ClassVar[bool] = True

    kind: Literal["inverse_time"] = "inverse_time"
    alpha: float = Field(gt=0, description="strong convexity of the clients' objectives")
    gamma: float = Field(ge=0, description="offset of t; the theorem needs max(8 beta / alpha, local steps a round)")

    def factor(self, round_index: int, step: int) -> float:
        """Return 2 / (alpha (gamma + step + 1))."""
        del round_index
        return 2 / (self.alpha * (self.gamma + step + 1))


class Warmup(Section):
    """The learning rate rises linearly from a share of it over the first rounds, or over the first local steps.

    The factor is that of `schedule` times the share, which is `initial_share` in round 1, or at the first step, and 1
    after `rounds` rounds, or `steps` steps. Both count from the start of the run: `{kind: warmup, rounds: 5, schedule:
    {kind: cosine, rounds: 100}}` ends at round 100. Steps are those of the client with most examples.

    Reference: Goyal et al., Accurate, Large Minibatch SGD, 2017 (arXiv:1706.02677), section 2.2.
    """

    kind: Literal["warmup"] = "warmup"
    rounds: int | None = Field(
        None, ge=1, description="rounds over which the learning rate rises; or steps", json_schema_extra=ROUNDS
    )
    steps: int | None = Field(None, ge=1, description="local steps over which the learning rate rises; or rounds")
    initial_share: float = Field(0.1, gt=0, le=1, description="share of the learning rate at the start")
    schedule: RateSchedule | None = Field(None, description="schedule of the whole learning rate; null: constant")

    @model_validator(mode="after")
    def _by_one_unit(self) -> Self:
        if (self.rounds is None) == (self.steps is None):
            raise ValueError("warmup rises over rounds or over steps; give one of the two")
        return self

    @property
    def by_step(self) -> bool:
        """True if the rise, or the schedule, changes within a round."""
        return self.steps is not None or (self.schedule is not None and self.schedule.by_step)

    def factor(self, round_index: int, step: int) -> float:
        """Return 1 - (1 - s) (1 - t) times the factor of `schedule`; t is the part of the rise that is over."""
        passed = (round_index - 1) / self.rounds if self.rounds else step / (self.steps or 1)
        share = 1 - (1 - self.initial_share) * (1 - min(passed, 1.0))
        return share if self.schedule is None else share * self.schedule.factor(round_index, step)


RateSchedule = Annotated[LearningRateSchedule, LEARNING_RATE_SCHEDULES]
Warmup.model_rebuild()


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
        for _, rows, batches, batch in step_batches(loader, schedule, point.draws, batched=point.batched):
            sizes = to_tensor(schedule.sizes[batches], loader.device).to(loader.dtype)
            compute = of_all or gradient_of_one(module, point.loss, rows_of(point.frozen, rows), steps)
            weights = batch.weights * sizes.unsqueeze(1)
            gradients, _ = compute(rows_of(values, rows), batch.features, batch.labels, weights)
            samples[rows] += sizes
            for name, gradient in gradients.items():
                total[name][rows] += gradient
    for tensor in total.values():
        tensor.div_(samples.clamp(min=1).view(-1, *[1] * (tensor.ndim - 1)))
    return total
