"""A solve: a problem without clients and its solver, in one frozen model that reads from and writes to YAML."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from narrowcast import packaged
from narrowcast.experiment import replicas_of
from narrowcast.platform.config.catalog import PROBLEMS, SOLVERS
from narrowcast.platform.config.fields import ITERATIONS, Name, Role
from narrowcast.platform.config.files import Defaults, plain_values, plugin_folders, validate
from narrowcast.platform.config.run_fields import (
    CheckpointEvery,
    CheckpointPath,
    CheckpointSeconds,
    CheckpointsKept,
    Identified,
    Tracking,
)
from narrowcast.platform.errors import UserError
from narrowcast.platform.solving import ProblemSource, Solver
from narrowcast.platform.tracking.metrics import Targets


class SolveTracking(Tracking):
    """The tracking store of solves, in an MLflow experiment of their own, since their columns and charts are others."""

    experiment: str = Field("narrowcast-solves", min_length=1, description="name of the MLflow experiment")


class _Checked(type(BaseModel)):  # type: ignore[misc]
    """Makes a solve built in Python the same as one read from a file: its checks and errors."""

    def __call__(cls, **values: Any) -> Solve:
        return build_solve({"name": "solve", **values}, "Solve")


class Solve(Identified, metaclass=_Checked):
    """One solve: problem, solver, when it ends, and where it is tracked.

    The time of the solver, `solver_seconds`, is that of its first state and of its iterations; measurements of the
    answer, the journal and checkpoints are not in it. A limit of it makes the number of iterations depend on the
    machine, unlike all other settings; the iterations themselves are the same everywhere.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    problem: Annotated[ProblemSource, PROBLEMS] = Field(description="problem to solve")
    solver: Annotated[Solver, SOLVERS] = Field(description="iterative method, with its parameters")
    seed: Annotated[int, Role(not_tuned="the seeds of a trial are study.seeds")] = Field(
        0, ge=0, lt=2**63, description="seed of the solver, and of its problem unless problem.seed is set"
    )
    iterations: Annotated[int, Role(identity=False)] = Field(1000, ge=1, description="largest number of iterations")
    tolerance: Annotated[FiniteFloat | None, Role(identity=False)] = Field(
        None, ge=0, description="residual of the solver at which the solve ends; null: none"
    )
    solver_seconds: Annotated[FiniteFloat | None, Role(identity=False)] = Field(
        None, gt=0, description="time of the solver after which the solve ends; null: no limit"
    )
    record_every: Annotated[int, Role(identity=False, not_tuned="it does not affect a run")] = Field(
        1, ge=1, description="interval of the iterations in the journal and in MLflow", json_schema_extra=ITERATIONS
    )
    evaluate_every: Annotated[int, Role(identity=False, not_tuned="trials are compared after the same iterations")] = (
        Field(
            10,
            ge=1,
            description="interval of measurements of the answer; the last iteration has one",
            json_schema_extra=ITERATIONS,
        )
    )
    spacing: Annotated[
        FiniteFloat | None, Role(identity=False, not_tuned="trials are compared after the same iterations")
    ] = Field(
        None,
        gt=1,
        le=100,
        description="ratio of one recorded and measured iteration to the next, such as 1.1, in place of record_every "
        "and evaluate_every; null: these",
    )
    checkpoint_every: CheckpointEvery = Field(None, json_schema_extra=ITERATIONS)
    checkpoint_seconds: CheckpointSeconds = 10.0
    checkpoints_kept: CheckpointsKept = 2
    checkpoint_path: CheckpointPath = None
    name: Annotated[Name, Role(identity=False, shared=True, not_tuned="trials are named after their study")] = Field(
        "solve", max_length=100, description="name of the run and of its folder"
    )
    tracking: Annotated[
        SolveTracking, Role(identity=False, shared=True, not_tuned="all trials of a study go to one store")
    ] = Field(SolveTracking(), description="MLflow store of the run")
    targets: Annotated[Targets, Role(identity=False, not_tuned="they do not affect a run")] = Field(
        {}, description="values of metrics; iterations and solver time until each is reached are reported"
    )

    @property
    def problem_source(self) -> ProblemSource:
        """The problem with its seed: that of the run, unless `problem.seed` is set."""
        return self.problem.of_seed(self.seed)

    def records(self, iteration: int) -> bool:
        """Return whether this iteration is recorded."""
        return iteration % self.record_every == 0 if self.spacing is None else self._is_spaced(iteration)

    def evaluates(self, iteration: int) -> bool:
        """Return whether the answer is measured after this iteration."""
        return iteration % self.evaluate_every == 0 if self.spacing is None else self._is_spaced(iteration)

    def _is_spaced(self, iteration: int) -> bool:
        """Return whether a power of `spacing` is in (iteration - 1, iteration]; those up to 1 are of iteration 1."""
        if iteration <= 1:
            return iteration == 1
        ratio = self.spacing or 1.0
        nearest = round(math.log(iteration, ratio))  # a rounded logarithm alone would miss powers that are whole
        return any(iteration - 1 < ratio**exponent <= iteration for exponent in (nearest - 1, nearest))

    def keeps(self, iteration: int, seconds: float) -> bool:
        """Return whether a checkpoint is due after this iteration, the given wall time after the last one."""
        by_number = self.checkpoint_every is not None and iteration % self.checkpoint_every == 0
        return by_number or seconds >= self.checkpoint_seconds


def load_solve(source: str | Mapping[str, Any] | Solve, overrides: Iterable[str] = ()) -> Solve:
    """Return a solve from a YAML file or mapping, or a given one, with overrides `a.b=value`."""
    solves = load_solves(source, overrides)
    if len(solves) > 1:
        raise UserError(f"{solves[0].name} is one of {len(solves)} replicas; leave replicas out here")
    return solves[0]


def load_solves(source: str | Mapping[str, Any] | Solve, overrides: Iterable[str] = ()) -> list[Solve]:
    """Return the solve of `load_solve` once for every combination of the values under `replicas`."""
    if isinstance(source, Solve):
        values, origin = plain_values(source), source.name
    else:
        values, origin = packaged.read_experiment(source)
    defaults = Defaults(Solve, plugin_folders(origin))
    return [build_solve(solve, origin) for solve in replicas_of(Solve, values, origin, defaults, overrides)]


def build_solve(values: dict[str, Any], origin: str) -> Solve:
    """Return the validated solve."""
    return validate(Solve, values, origin)
