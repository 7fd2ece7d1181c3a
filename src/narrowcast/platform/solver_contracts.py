"""Contracts of problems without clients and of their solvers; the iteration loop relies on nothing else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from narrowcast.platform.described import Described
from narrowcast.platform.kinds import optional
from narrowcast.platform.types import Arrays

Status = Literal["running", "converged", "stalled", "diverged"]


@dataclass(frozen=True)
class Report:
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


class Problem(Described, Protocol):
    """A problem that is loaded: its data, and how an answer is measured.

    One whose measurements may take longer than iterations has a method `measurement_work(answer: Arrays) -> Work` too:
    the loop then leaves out measurements that would take more of the run than its iterations.
    """

    def measure(self, answer: Arrays) -> Mapping[str, float]:
        """Return the metrics of an answer; those that depend on held-out data are named `test.metric`."""
        ...


def name_of(problem: Any) -> str:
    """Return the name of a problem, or of what was given in its place, short enough for an error."""
    return f"{optional(problem, 'name', problem)!s:.60}"


class ProblemSource(Protocol):
    """A problem as a file names it: a frozen model whose fields are its settings.

    A field `seed: int | None = None` follows the seed of the run unless it is set. A source whose every seed draws a
    problem that has nothing in common with the others has a class attribute `drawn = True`: a study may then choose
    settings by metrics of test, since other seeds test the choice.
    """

    @property
    def kind(self) -> str:
        """The problem's name in the catalog."""
        ...

    @property
    def lower_is_better(self) -> Collection[str]:
        """The metrics of the problem whose lower value is better, by the last part of their names."""
        ...

    def load(self) -> Problem:
        """Read or draw the `Problem`; raise `UserError` for a file that is none."""
        ...


class Solver(Protocol):
    """An iterative method: a frozen model whose fields are its parameters, with explicit state.

    The arrays of a state hold everything that the next iteration depends on besides the problem, counters and step
    sizes included, so that a solve that is resumed gives the same answer. What follows from the problem alone, such
    as a sparsity pattern, belongs to the problem.
    """

    @property
    def kind(self) -> str:
        """The solver's name in the catalog."""
        ...

    def check(self, problem: Any) -> None:
        """Raise `UserError` if the solver does not take this `Problem`, or not with these parameters."""
        ...

    def init(self, problem: Any, seed: int) -> Arrays:
        """Return the state before the first iteration; the time that it takes counts."""
        ...

    def step(self, problem: Any, state: Arrays) -> tuple[Arrays, Report]:
        """Return the state after one iteration; may reuse the memory of `state`, which is not read again."""
        ...

    def answer(self, state: Arrays) -> Arrays:
        """Return the answer that the state stands for, such as factors or a vector of labels; changes nothing."""
        ...
