"""Learning-rate schedules: the factor of `training.learning_rate` in each round, or at each local step."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Protocol, Self

from pydantic import Field, model_validator

from narrowcast.platform.kinds import Registry
from narrowcast.platform.section import Section
from narrowcast.platform.units import ROUNDS

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
        return float(self.decay ** sum(each < round_index for each in self.rounds))


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


LEARNING_RATE_SCHEDULES = Registry(
    "learning_rate_schedule",
    LearningRateSchedule,
    {
        "constant": Constant,
        "step": StepDecay,
        "milestones": Milestones,
        "cosine": Cosine,
        "inverse_time": InverseTime,
        "warmup": Warmup,
    },
)
RateSchedule = Annotated[LearningRateSchedule, LEARNING_RATE_SCHEDULES]
Warmup.model_rebuild()
