"""Learning-rate schedules: the factor of `training.learning_rate` in each round, or at each local step."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Protocol

from pydantic import Field

from narrowcast.platform.kinds import Registry
from narrowcast.platform.section import Section
from narrowcast.platform.units import ROUNDS


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


LEARNING_RATE_SCHEDULES = Registry(
    "learning_rate_schedule",
    LearningRateSchedule,
    {"constant": Constant, "step": StepDecay, "milestones": Milestones, "cosine": Cosine, "inverse_time": InverseTime},
)
RateSchedule = Annotated[LearningRateSchedule, LEARNING_RATE_SCHEDULES]
