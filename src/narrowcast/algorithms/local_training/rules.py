"""Local steps: gradient descent, Adam and AdamW as rules, and learning rates by round or step.

An algorithm may bring a rule of its own in their place. Each client's step is that of torch's optimiser of the same
name, for one client and for many at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from narrowcast.platform.config.catalog import LEARNING_RATE_SCHEDULES
from narrowcast.platform.config.fields import ROUNDS
from narrowcast.platform.config.files import Section
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Gradient

Rate = float | Tensor
"""A learning rate that all clients share, or one for each, [a] in float64."""


@dataclass(frozen=True)
class GradientDescent:
    """y -= lr v with v = momentum v + g."""

    momentum: float = 0.0
    parts: int = 1

    def init(self, start: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return room for v, if there is momentum."""
        del own
        return {name: torch.empty_like(values) for name, values in start.items()} if self.momentum else {}

    def step(
        self,
        values: Mapping[str, Any],
        slots: Mapping[str, Any],
        gradient: Gradient,
        own: Mapping[str, Any],
        rate: Rate,
        step: int,
    ) -> None:
        """Move against the gradients, or against their running sum."""
        del own
        moves = gradient(values, 0)
        if self.momentum:
            for name, direction in moves.items():
                if step:
                    torch.add(direction, slots[name], alpha=self.momentum, out=slots[name])
                else:
                    slots[name].copy_(direction)
                moves[name] = slots[name]
        if isinstance(rate, float):
            torch._foreach_sub_([values[name] for name in moves], list(moves.values()), alpha=rate)
        else:
            for name, direction in moves.items():
                values[name].addcmul_(direction, along(rate.to(direction.dtype), direction), value=-1)


@dataclass(frozen=True)
class AdamSteps:
    """y -= lr m' / (sqrt(v') + eps), with the moments m and v of g and of its square, divided by 1 - beta^t.

    Before it y is multiplied by 1 - lr decay: the decoupled decay of AdamW.

    References: Kingma and Ba, Adam, ICLR 2015 (arXiv:1412.6980), Algorithm 1; Loshchilov and Hutter, Decoupled Weight
    Decay Regularization, ICLR 2019 (arXiv:1711.05101), Algorithm 2, with the decay scaled by lr, as in torch.
    """

    beta1: float
    beta2: float
    eps: float
    decay: float = 0.0
    parts: int = 1

    def init(self, start: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the moments of each parameter: zeros."""
        del own
        return {f"{moment} {name}": torch.zeros_like(values) for name, values in start.items() for moment in "mv"}

    def step(
        self,
        values: Mapping[str, Any],
        slots: Mapping[str, Any],
        gradient: Gradient,
        own: Mapping[str, Any],
        rate: Rate,
        step: int,
    ) -> None:
        """Move by the ratio of the moments."""
        del own
        correction = 1 - self.beta1 ** (step + 1), (1 - self.beta2 ** (step + 1)) ** 0.5
        for name, direction in gradient(values, 0).items():
            value, first, second = values[name], slots[f"m {name}"], slots[f"v {name}"]
            first.lerp_(direction, 1 - self.beta1)
            second.mul_(self.beta2).addcmul_(direction, direction, value=1 - self.beta2)
            if self.decay:
                value.mul_(_for_all(1 - rate * self.decay, value))
            spread = second.sqrt().div_(correction[1]).add_(self.eps)
            value.addcdiv_(first * _for_all(rate / correction[0], value), spread, value=-1)


Optimizer = GradientDescent | AdamSteps
"""The rules of trainings. They begin anew in each round, and clients may have learning rates of their own."""


def along(values: Tensor, like: Tensor) -> Tensor:
    """Reshape one value per client [a] so that it multiplies tensors [a, ...]."""
    return values.view(-1, *[1] * (like.ndim - 1))


def _for_all(rate: Rate, like: Tensor) -> Rate:
    return rate if isinstance(rate, float) else along(rate.to(like.dtype), like)


def only_gradient_descent(task: Task, reason: str, otherwise: str = "") -> None:
    """Raise `UserError`, with the reason, if the task's training takes other steps than along its gradients.

    A training says so by its traits. `otherwise` is what else the user may set.
    """
    if not task.training.traits.descends_gradients:
        advice = f"use sgd, or set {otherwise}" if otherwise else "use sgd"
        raise UserError(f"{reason}, and training.kind = {task.training.kind} does not take such steps; {advice}")


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
