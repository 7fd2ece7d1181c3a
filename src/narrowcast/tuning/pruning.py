"""Pruners: stopping a trial early, by Optuna's rules over rounds, bits or simulated seconds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
from pydantic import ConfigDict, Field, model_validator

from narrowcast.platform.config.catalog import PRUNERS
from narrowcast.platform.config.files import Section
from narrowcast.platform.config.kinds import from_fields

Direction = Literal["maximize", "minimize"]
Point = tuple[int, float]
"""A step and the trial's value at it."""


@dataclass(frozen=True)
class Steps:
    """The steps at which a pruner compares trials, and the objective by which, None for the only one.

    A step is a round or an iteration, or `every` units of another axis.
    """

    axis: str = "rounds"
    every: float | None = None
    on: str | None = None


class Pruner(ABC):
    """A pruner as `study.pruner` configures it."""

    if TYPE_CHECKING:

        @property
        def kind(self) -> str:
            """The name that picks it in a study file."""

    @property
    def steps(self) -> Steps:
        """The steps that its fields `axis`, `every` and `on` say."""
        return from_fields(Steps, self)

    @abstractmethod
    def make(self) -> BasePruner:
        """Return Optuna's pruner."""


class _PrunerFields(Pruner, Section):
    """Trials are compared at equal rounds, equal uplink, equal traffic both ways or equal simulated time (`axis`).

    Those of solves are compared at equal iterations, or at equal time of the solver. A step is a round or an iteration,
    or `every` bits or seconds of the other axes.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    axis: Literal["rounds", "uplink_bits", "total_bits", "simulated_seconds", "iterations", "solver_seconds"] = Field(
        "rounds", description="resource at whose equal use trials are compared; rounds of a solve are its iterations"
    )
    every: float | None = Field(
        None, gt=0, description="size of a step in units of the axis, bits or seconds; none for rounds and iterations"
    )
    on: str | None = Field(None, description="objective to prune by, if there are several")

    @model_validator(mode="after")
    def _has_a_step(self) -> _PrunerFields:
        counted = self.axis in ("rounds", "iterations")
        if (self.every is None) != counted:
            wanted = "takes no every" if counted else "needs every, the size of a step"
            raise ValueError(f"axis = {self.axis} {wanted}")
        return self


class NoPruning(Pruner, Section):
    """Run every trial to its end."""

    kind: Literal["none"] = "none"

    def make(self) -> BasePruner:
        """Return a pruner that stops nothing."""
        return NopPruner()


class MedianPruning(_PrunerFields):
    """Stop a trial whose best value so far is worse than the median of the other trials at this step."""

    kind: Literal["median"] = "median"
    startup_trials: int = Field(5, ge=0, description="number of trials that run to their end first")
    warmup_steps: int = Field(0, ge=0, description="steps before a trial may be stopped")

    def make(self) -> BasePruner:
        """Return Optuna's median pruner."""
        return MedianPruner(n_startup_trials=self.startup_trials, n_warmup_steps=self.warmup_steps)


class SuccessiveHalvingPruning(_PrunerFields):
    """ASHA (Li et al., MLSys 2020): at steps min, min x factor, ... continue the best 1 / factor of the trials."""

    kind: Literal["successive_halving"] = "successive_halving"
    min_steps: int = Field(1, ge=1, description="first step at which trials are compared")
    factor: int = Field(4, ge=2, description="one of so many trials continues")

    def make(self) -> BasePruner:
        """Return Optuna's asynchronous successive halving."""
        return SuccessiveHalvingPruner(min_resource=self.min_steps, reduction_factor=self.factor)


class HyperbandPruning(_PrunerFields):
    """Hyperband (Li et al., JMLR 2018): several successive halvings with different first steps."""

    kind: Literal["hyperband"] = "hyperband"
    min_steps: int = Field(1, ge=1, description="first step at which trials are compared")
    max_steps: int = Field(ge=1, description="number of steps of a whole trial")
    factor: int = Field(3, ge=2, description="one of so many trials continues")

    def make(self) -> BasePruner:
        """Return Optuna's asynchronous Hyperband."""
        return HyperbandPruner(min_resource=self.min_steps, max_resource=self.max_steps, reduction_factor=self.factor)


class ThresholdPruning(_PrunerFields):
    """Stop a trial whose value leaves the given bounds."""

    kind: Literal["threshold"] = "threshold"
    at_least: float | None = Field(None, description="a trial with a lower value is stopped")
    at_most: float | None = Field(None, description="a trial with a higher value is stopped")
    warmup_steps: int = Field(0, ge=0, description="steps before a trial may be stopped")

    @model_validator(mode="after")
    def _has_a_bound(self) -> ThresholdPruning:
        if self.at_least is None and self.at_most is None:
            raise ValueError("a threshold needs at_least or at_most")
        return self

    def make(self) -> BasePruner:
        """Return Optuna's threshold pruner."""
        return ThresholdPruner(lower=self.at_least, upper=self.at_most, n_warmup_steps=self.warmup_steps)


AnyPruner = Annotated[Pruner, PRUNERS]


class LearningCurve:
    """The values of one trial by step; between two evaluations the curve keeps the earlier value."""

    def __init__(self, axis: str, every: float | None) -> None:
        self._column = {"rounds": "round", "iterations": "round", "uplink_bits": "total_uplink_bits"}.get(axis, axis)
        self._every = every
        self.points: list[Point] = []
        self._held: float | None = None

    def extend(self, row: Mapping[str, Any], value: float) -> list[Point]:
        """Add an evaluation; return the steps that it is the first to reach, with their values."""
        if self._every is None:
            new = [(int(row[self._column]), value)]
        else:
            done, now = (self.points[-1][0] if self.points else 0), float(row[self._column]) / self._every
            passed = range(done + 1, int(now) + 1)
            # A step exactly here has this value; a step passed since the last evaluation has the value of that.
            new = [(step, value if step == now or self._held is None else self._held) for step in passed]
        self._held = value
        self.points.extend(new)
        return new


class OneObjectivePruning:
    """Prune a study of several objectives, which Optuna does not support, by one of them.

    A second study of that objective alone is kept in memory, with the same trials, and Optuna's pruner decides there.
    Values of the other objectives do not protect a trial: one that would have ended on the Pareto front for its few
    bits may be stopped for its accuracy. A pruned trial has no values in the stored study and is never on the front.
    """

    def __init__(self, pruner: BasePruner, direction: Direction) -> None:
        self._study = optuna.create_study(direction=direction, pruner=pruner)
        self._running: dict[int, Trial] = {}
        self._known: set[int] = set()

    def add_finished(self, curves: Iterable[tuple[int, Sequence[Point]]]) -> None:
        """Add trials of other processes, or of before this process began, by number and curve; each only once."""
        for number, points in curves:
            if number not in self._known and points:
                self.begin(number)
                self.report(number, points)
                self.end(number, points)

    def begin(self, number: int) -> None:
        """Add a running trial."""
        self._known.add(number)
        self._running[number] = self._study.ask()

    def report(self, number: int, points: Sequence[Point]) -> bool:
        """Report points of a running trial; return whether to prune it."""
        for step, value in points:
            self._running[number].report(value, step)
        return bool(points) and self._running[number].should_prune()

    def end(self, number: int, points: Sequence[Point]) -> None:
        """End a running trial with its curve; an empty curve means that it failed."""
        trial = self._running.pop(number, None)
        if trial is not None:
            state = TrialState.COMPLETE if points else TrialState.FAIL
            self._study.tell(trial, points[-1][1] if points else None, state)
