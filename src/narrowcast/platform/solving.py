"""Problems without clients: the contracts of problems and solvers, and the loop of iterations.

The loop relies on nothing but the contracts. It keeps the state between iterations, decides when a solve ends, and
yields what is recorded of it.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, cast

import numpy as np

from narrowcast.platform.compiled import one_thread
from narrowcast.platform.config.plugins import said
from narrowcast.platform.data.dataset import Source
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.rounds.contract_checks import method_of, noun
from narrowcast.platform.rounds.state import Interrupted
from narrowcast.platform.storage.host import allow_signals, host_clock, stop_requested
from narrowcast.platform.types import ITERATION, ITERATION_COLUMNS, Arrays, PrefixedArrays, RunInput

Status = Literal["running", "converged", "stalled", "diverged"]


@dataclass(frozen=True)
class StepResult:
    """The end of an iteration: the residual that a tolerance is compared with, and whether the solver can go on.

    Each solver says what its residual is, such as the relative error on the observed entries. A solver that returns
    `converged`, `stalled` or `diverged` is not called again.
    """

    residual: float
    status: Status = "running"


@dataclass(frozen=True)
class Work:
    """About how many multiplications an iteration and a measurement of its answer take.

    They are counted, not timed, so that what is measured does not depend on the machine.
    """

    iteration: float
    measurement: float


class Problem(RunInput, ABC):
    """A problem that is loaded: its data, and how an answer is measured.

    A subclass overrides `measure`. The other methods are optional: each stands here with what it returns for a problem
    that does not offer it.
    """

    @abstractmethod
    def measure(self, answer: Arrays) -> Mapping[str, float]:
        """Return the metrics of an answer; those that depend on held-out data are named `test.metric`."""

    def measurement_work(self, answer: Arrays) -> Work:
        """Return the work of an iteration and of measuring this answer; by default it is not counted.

        Measurements that would take more of the run than its iterations are left out.
        """
        del answer
        return Work(0, 0)

    def baselines(self) -> Mapping[str, Mapping[str, float]]:
        """Return the metrics of answers to compare with, by the name of each; none by default."""
        return {}

    @property
    def exports(self) -> bool:
        """True if programs in other languages, solvers of the kind `program`, can be given it by `exported`."""
        return type(self).exported is not Problem.exported

    def exported(self) -> Arrays:
        """Return what programs in other languages are given of the problem, by the names of their files."""
        raise NotImplementedError(f"{type(self).__name__} has no exported")


def name_of(problem: Any) -> str:
    """Return the name of a problem, or of what was given in its place, short enough for an error."""
    return f"{problem.name if isinstance(problem, Problem) else problem!s:.60}"


def loaded_problem(source: ProblemSource) -> Problem:
    """Return what a source loads; raise `UserError` if what a source of others loads is not one."""
    problem = source.load()
    if not isinstance(problem, Problem):
        raise UserError(
            f"{method_of(source, 'load')} returned {noun(problem)}, which is not a problem: it has to extend Problem "
            "of narrowcast.extend"
        )
    return problem


class ProblemSource(Source):
    """A problem as a file names it.

    A source whose every seed draws a problem that has nothing in common with the others has `drawn = True`: a study may
    then choose settings by metrics of test, since other seeds test the choice.
    """

    drawn: ClassVar[bool] = False

    @property
    @abstractmethod
    def lower_is_better(self) -> Collection[str]:
        """The metrics of the problem whose lower value is better, by the last part of their names."""

    @property
    def shares(self) -> Collection[str] | None:
        """The metrics of the problem that lie between 0 and 1; None, the default: their words tell."""
        return None

    @abstractmethod
    def load(self) -> Problem:
        """Read or draw the `Problem`; raise `UserError` for a file that is none."""


class Solver(ABC):
    """An iterative method: a frozen model whose fields are its parameters, with explicit state.

    The arrays of a state hold everything that the next iteration depends on besides the problem, counters and step
    sizes included, so that a solve that is resumed gives the same answer. What follows from the problem alone, such
    as a sparsity pattern, belongs to the problem. `example` is a small problem that it takes, for its laws.
    """

    example: ClassVar[Any] = None

    if TYPE_CHECKING:

        @property
        def kind(self) -> str:
            """The solver's name in the catalog."""

    @abstractmethod
    def check(self, problem: Any) -> None:
        """Raise `UserError` if the solver does not take this `Problem`, or not with these parameters."""

    @abstractmethod
    def init(self, problem: Any, seed: int) -> Arrays:
        """Return the state before the first iteration; the time that it takes counts."""

    @abstractmethod
    def step(self, problem: Any, state: Arrays) -> tuple[Arrays, StepResult]:
        """Return the state after one iteration; may reuse the memory of `state`, which is not read again."""

    @abstractmethod
    def answer(self, state: Arrays) -> Arrays:
        """Return the answer that the state stands for, such as factors or a vector of labels; changes nothing."""


logger = logging.getLogger(__name__)
_SPACED = (
    "a measurement of the answer, with its proof, takes about as long as %.0f iterations: the answer is measured less "
    "often than asked, so that measurements take no longer than the iterations"
)
FREE_WORK = 3e9
"""Multiplications of measurements, some seconds of them, that are allowed whatever the iterations take."""


class Stopping(Protocol):
    """The end of a solve and what is due before it; `Solve` has these fields."""

    @property
    def iterations(self) -> int:
        """The largest number of iterations."""
        ...

    @property
    def tolerance(self) -> float | None:
        """The residual at which the solve ends, None for none."""
        ...

    @property
    def solver_seconds(self) -> float | None:
        """The time of the solver after which the solve ends, None for no limit."""
        ...

    def records(self, iteration: int) -> bool:
        """Return whether this iteration is recorded."""
        ...

    def evaluates(self, iteration: int) -> bool:
        """Return whether the answer is measured after this iteration."""
        ...

    def keeps(self, iteration: int, seconds: float) -> bool:
        """Return whether a checkpoint is due after this iteration, the given wall time after the last one."""
        ...


_SOLVER = PrefixedArrays("solver/")


@dataclass(frozen=True)
class SolveState:
    """Everything that the next iteration depends on, and the time of the solver so far, `init` included.

    `measured_work` is the work of all measurements so far, where the problem counts it. `settled` is the last iteration
    in the journal and the time of the solver there: of iterations up to it, which a resume repeats, those times count.
    """

    iteration: int
    arrays: Arrays
    solver_seconds: float
    residual: float = math.inf
    status: Status = "running"
    measured_work: float = 0.0
    settled: tuple[int, float] = (0, 0.0)

    step_name: ClassVar[str] = ITERATION

    @property
    def step(self) -> int:
        """The last iteration that is finished."""
        return self.iteration

    def packed(self) -> tuple[Arrays, dict[str, str]]:
        """Return the tensors and the metadata of a checkpoint."""
        tensors = {name: np.asarray(values, order="C") for name, values in _SOLVER.add(self.arrays).items()}
        numbers = {name: float(getattr(self, name)).hex() for name in ("solver_seconds", "residual", "measured_work")}
        return tensors, {ITERATION: str(self.iteration), "status": self.status, **numbers}

    @classmethod
    def unpacked(cls, tensors: Arrays, metadata: Mapping[str, str]) -> Self:
        """Return the state of a checkpoint; raise `KeyError` or `ValueError` if it is not one."""
        return cls(
            iteration=int(metadata[ITERATION]),
            arrays=_SOLVER.of(tensors),
            solver_seconds=float.fromhex(metadata["solver_seconds"]),
            residual=float.fromhex(metadata["residual"]),
            status=cast(Status, metadata["status"]),
            measured_work=float.fromhex(metadata.get("measured_work", "0")),  # states of version 0.2 have none
        )


@dataclass(frozen=True)
class Iteration:
    """A recorded iteration; `metrics` is empty unless a measurement was due, `state` is None unless a checkpoint is."""

    step: int
    residual: float
    solver_seconds: float
    metrics: Mapping[str, float]
    wall_seconds: float
    evaluate_seconds: float
    state: SolveState | None

    def row(self) -> dict[str, Any]:
        """Return the iteration's row of the journal, without its metrics and the time since the start of the run."""
        return {
            ITERATION: self.step,
            "residual": self.residual,
            "solver_seconds": self.solver_seconds,
            "step_wall_seconds": self.wall_seconds - self.evaluate_seconds,
            "evaluate_wall_seconds": self.evaluate_seconds,
        }

    def entry(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the iteration's line of the journal."""
        return {ITERATION: row}


def begin(problem: Problem, solver: Solver, seed: int) -> SolveState:
    """Return the state before the first iteration; the time that the solver takes for it counts."""
    with one_thread():
        began = time.perf_counter()
        arrays = solver.init(problem, seed)
        return SolveState(0, arrays, time.perf_counter() - began)


def measured(problem: Problem, solver: Solver, state: SolveState) -> Mapping[str, float]:
    """Return the metrics of the answer; raise `UserError` for one with the name of a column of the journal."""
    metrics = problem.measure(solver.answer(state.arrays))
    if taken := sorted(ITERATION_COLUMNS & metrics.keys()):
        raise UserError(f"{problem.name} has a metric called {taken[0]}, as a column of every solve; rename it")
    return metrics


def work_of(problem: Problem, solver: Solver, state: SolveState) -> Work:
    """Return the work of an iteration and of a measurement now, none where the problem does not count it."""
    return problem.measurement_work(solver.answer(state.arrays))


def is_affordable(work: Work, state: SolveState) -> bool:
    """Return whether measurements, with this one and that of the last iteration, take no more work than the iterations.

    Beyond that, `FREE_WORK` is allowed.
    """
    measurements = state.measured_work + 2 * work.measurement
    return work.measurement == 0 or measurements <= FREE_WORK + state.iteration * work.iteration


def end_of(stopping: Stopping, state: SolveState) -> str | None:
    """Return why a solve ends with this state, such as `tolerance`, or None if it goes on."""
    if state.status != "running":
        return state.status
    if stopping.tolerance is not None and state.residual <= stopping.tolerance:
        return "tolerance"
    if state.iteration >= stopping.iterations:
        return "iterations"
    late = stopping.solver_seconds is not None and state.solver_seconds >= stopping.solver_seconds
    if late and state.iteration:  # an answer without any iteration would say nothing of the solver
        return "solver_seconds"
    return None


def _ends(stopping: Stopping, state: SolveState) -> bool:
    """Return whether the solve ends with this state; repeated iterations may take longer than those in the journal."""
    why = end_of(stopping, state)
    return why is not None and not (why == "solver_seconds" and state.iteration < state.settled[0])


def iterations(
    problem: Problem, solver: Solver, stopping: Stopping, state: SolveState
) -> Generator[Iteration, None, None]:
    """Run the iterations after `state` until one of the rules of `stopping` ends them; yield those that are recorded.

    Measurements of the answer are not part of the time of the solver; those that are due but not affordable are left
    out. Raise `Interrupted` if stopped between two
    iterations, and `RunFailed` if the residual is no longer finite, or if the solver diverges.
    """
    kept_at, recorded = host_clock().monotonic(), state.iteration
    wall = 0.0 if state.iteration else state.solver_seconds  # the first row has the time of the first state too
    ended, spaced = _ends(stopping, state), False
    while not ended:
        metrics: Mapping[str, float] = {}
        measured_for, stopped = 0.0, False
        # Once for all iterations up to one that is recorded: each change costs microseconds.
        with one_thread(), _naming(lambda: state.iteration):  # noqa: B023 - called in the same round of the loop
            due = False
            while not due and not (stopped := _is_stopped()):
                began = time.perf_counter()
                arrays, report = solver.step(problem, state.arrays)
                seconds = time.perf_counter() - began
                state = replace(
                    state,
                    iteration=state.iteration + 1,
                    arrays=arrays,
                    solver_seconds=state.solver_seconds + seconds,
                    residual=float(report.residual),
                    status=report.status,
                )
                wall += seconds
                if state.iteration == state.settled[0]:
                    state, wall = replace(state, solver_seconds=state.settled[1]), 0.0
                if not math.isfinite(state.residual) or state.status == "diverged":
                    raise RunFailed(
                        f"the solver diverged: residual {state.residual:g} after iteration {state.iteration}; use "
                        "smaller steps, a lower rank, or another solver"
                    )
                ended = _ends(stopping, state)
                if ended or stopping.evaluates(state.iteration):
                    began = time.perf_counter()
                    work = work_of(problem, solver, state)
                    if ended or is_affordable(work, state):
                        metrics = measured(problem, solver, state)
                        state = replace(state, measured_work=state.measured_work + work.measurement)
                    elif not spaced:
                        spaced = True
                        logger.warning(_SPACED, work.measurement / max(work.iteration, 1.0))
                    measuring = time.perf_counter() - began
                    measured_for, wall = measured_for + measuring, wall + measuring
                due = ended or bool(metrics) or stopping.records(state.iteration)
        if stopped:
            if state.iteration > recorded:  # a resume needs the journal up to the state that it begins with
                yield Iteration(state.iteration, state.residual, state.solver_seconds, {}, wall, 0.0, None)
            raise Interrupted([state])
        kept = None
        if ended or stopping.keeps(state.iteration, host_clock().monotonic() - kept_at):
            kept, kept_at = _copied(state), host_clock().monotonic()
        yield Iteration(state.iteration, state.residual, state.solver_seconds, metrics, wall, measured_for, kept)
        recorded, wall = state.iteration, 0.0


@contextmanager
def _naming(last_iteration: Callable[[], int]) -> Iterator[None]:
    """Raise an error of the solver or the problem as a `RunFailed` of one line that names the iteration."""
    try:
        yield
    except (UserError, RunFailed):
        raise
    except (Exception, SystemExit) as error:
        raise RunFailed(f"after iteration {last_iteration()}: {said(error)}") from error


def _is_stopped() -> bool:
    """Return whether the run was asked to stop, and has to between two iterations."""
    if not stop_requested():
        return False
    try:
        with allow_signals():
            return False
    except KeyboardInterrupt:
        return True


def _copied(state: SolveState) -> SolveState:
    """Return the state with arrays of its own, since a step may reuse the memory of the last one."""
    return replace(state, arrays={name: np.array(values) for name, values in state.arrays.items()})
