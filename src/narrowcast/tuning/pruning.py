"""When a trial is stopped early: Optuna's pruners over rounds, bits or simulated seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

import optuna
from optuna.pruners import (
    BasePruner,
    HyperbandPruner,
    MedianPruner,
    NopPruner,
    SuccessiveHalvingPruner,
    ThresholdPruner,
)
from optuna.trial import Trial, TrialState
from pydantic import BaseModel, ConfigDict, Field, model_validator

from narrowcast.platform.kinds import Registry

Direction = Literal["maximize", "minimize"]
Point = tuple[int, float]
"""A step and the value that a trial has there."""


class Pruner(Protocol):
    """A pruner as a study file names it."""

    kind: str
    axis: Literal["rounds", "uplink_bits", "simulated_seconds"]
    every: float | None
    on: str | None

    def make(self) -> BasePruner:
        """Optuna's."""
        ...


class _Settings(BaseModel):
    """Trials are compared where they have had the same number of rounds, or the same uplink, or simulated time.

    `every` is the size of a step in bits or seconds; all numbers of steps are in it. Over rounds a step is a round.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    axis: Literal["rounds", "uplink_bits", "simulated_seconds"] = "rounds"
    every: float | None = Field(None, gt=0, description="bits or seconds of a step")
    on: str | None = Field(None, description="of several objectives, the one that pruning looks at")

    @model_validator(mode="after")
    def _has_a_step(self) -> _Settings:
        if (self.every is None) != (self.axis == "rounds"):
            wanted = "takes no every" if self.axis == "rounds" else "needs every, the size of a step"
            raise ValueError(f"axis = {self.axis} {wanted}")
        return self


class NoPruner(BaseModel):
    """Every trial is played to its end."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["none"] = "none"

    def make(self) -> BasePruner:
        """One that stops nothing."""
        return NopPruner()


class Median(_Settings):
    """Stops a trial whose best value so far is below the median of the others' at this step."""

    kind: Literal["median"] = "median"
    startup_trials: int = Field(5, ge=0, description="played to their ends first")
    warmup_steps: int = Field(0, ge=0, description="of a trial, before it may be stopped")

    def make(self) -> BasePruner:
        """Optuna's median pruner."""
        return MedianPruner(n_startup_trials=self.startup_trials, n_warmup_steps=self.warmup_steps)


class SuccessiveHalving(_Settings):
    """ASHA (Li et al., MLSys 2020): at steps min, min x factor, ... the best 1 / factor of the trials go on."""

    kind: Literal["successive_halving"] = "successive_halving"
    min_steps: int = Field(1, ge=1)
    factor: int = Field(4, ge=2)

    def make(self) -> BasePruner:
        """Optuna's asynchronous successive halving."""
        return SuccessiveHalvingPruner(min_resource=self.min_steps, reduction_factor=self.factor)


class Hyperband(_Settings):
    """Several successive halvings, from bold to careful (Li et al., JMLR 2018)."""

    kind: Literal["hyperband"] = "hyperband"
    min_steps: int = Field(1, ge=1)
    max_steps: int = Field(ge=1, description="the steps of a whole trial")
    factor: int = Field(3, ge=2)

    def make(self) -> BasePruner:
        """Optuna's asynchronous Hyperband."""
        return HyperbandPruner(min_resource=self.min_steps, max_resource=self.max_steps, reduction_factor=self.factor)


class Threshold(_Settings):
    """Stops a trial whose value leaves stated bounds."""

    kind: Literal["threshold"] = "threshold"
    at_least: float | None = None
    at_most: float | None = None
    warmup_steps: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _has_a_bound(self) -> Threshold:
        if self.at_least is None and self.at_most is None:
            raise ValueError("a threshold needs at_least or at_most")
        return self

    def make(self) -> BasePruner:
        """Optuna's threshold pruner."""
        return ThresholdPruner(lower=self.at_least, upper=self.at_most, n_warmup_steps=self.warmup_steps)


PRUNERS = Registry(
    "pruner",
    Pruner,
    {
        "none": NoPruner,
        "median": Median,
        "successive_halving": SuccessiveHalving,
        "hyperband": Hyperband,
        "threshold": Threshold,
    },
    "none",
)
AnyPruner = Annotated[Pruner | NoPruner, PRUNERS]


class Curve:
    """One trial's value step by step. Between two evaluations it keeps the value of the earlier one."""

    def __init__(self, axis: str, every: float | None) -> None:
        self._column = {"rounds": "round", "uplink_bits": "total_uplink_bits"}.get(axis, axis)
        self._every = every
        self.points: list[Point] = []
        self._held: float | None = None

    def extend(self, row: Mapping[str, Any], value: float) -> list[Point]:
        """The steps that an evaluation is the first to reach, and their values."""
        if self._every is None:
            new = [(int(row[self._column]), value)]
        else:
            done, now = (self.points[-1][0] if self.points else 0), float(row[self._column]) / self._every
            passed = range(done + 1, int(now) + 1)
            # A step that lies exactly here has this value; one passed on the way, what was known by then.
            new = [(step, value if step == now or self._held is None else self._held) for step in passed]
        self._held = value
        self.points.extend(new)
        return new


class ScalarPruning:
    """Pruning of a study of several objectives, which Optuna refuses, by one of them.

    A study of that objective alone is kept in memory beside the real one, with the same trials, and any of Optuna's
    pruners decides in it. What it cannot see, a trial's promise in the other objectives, does not protect the trial:
    one that would have ended on the Pareto front for its few bits may be stopped for its accuracy. A pruned trial has
    no values in the real study and never stands on the front.
    """

    def __init__(self, pruner: BasePruner, direction: Direction) -> None:
        self._study = optuna.create_study(direction=direction, pruner=pruner)
        self._running: dict[int, Trial] = {}
        self._known: set[int] = set()

    def learn(self, curves: Iterable[tuple[int, Sequence[Point]]]) -> None:
        """Take in trials that were played by others, or before this process began; each once."""
        for number, points in curves:
            if number not in self._known and points:
                self.begin(number)
                self.stop(number, points)
                self.end(number, points)

    def begin(self, number: int) -> None:
        """A trial starts."""
        self._known.add(number)
        self._running[number] = self._study.ask()

    def stop(self, number: int, points: Sequence[Point]) -> bool:
        """Report points of a trial; whether it is to be stopped."""
        for step, value in points:
            self._running[number].report(value, step)
        return bool(points) and self._running[number].should_prune()

    def end(self, number: int, points: Sequence[Point]) -> None:
        """A trial is over, with these points."""
        trial = self._running.pop(number, None)
        if trial is not None:
            state = TrialState.COMPLETE if points else TrialState.FAIL
            self._study.tell(trial, points[-1][1] if points else None, state)
