"""Laws of problems and of solvers, on which a solve, its checkpoints and its resumes rely."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from narrowcast.laws.law import require
from narrowcast.laws.small_tasks import digest
from narrowcast.platform.config.catalog import PROBLEMS
from narrowcast.platform.errors import UserError
from narrowcast.platform.solving import Problem, ProblemSource, Solver, SolveState, begin, loaded_problem, measured
from narrowcast.platform.types import Arrays

_ITERATIONS = 6
SMALL: Mapping[str, Mapping[str, Any]] = {
    "synthetic_completion": {"rows": 40, "columns": 30, "fraction": 0.5},
    "sensor_localisation": {"sensors": 12, "anchors": 6, "radio_range": 0.7},
    "random_max_cut": {"vertices": 30, "edges": 90, "roundings": 4},
}
"""Fields of small problems of the catalog, by kind, on which solvers are tried."""


@dataclass(frozen=True)
class SolverCase:
    """A solver and a problem that it takes."""

    solver: Solver
    problem: Problem

    def run(self, state: SolveState | None = None, count: int = _ITERATIONS) -> SolveState:
        """Return the state after some iterations from a state, or from the start; a solver that ends, ends."""
        state = state or begin(self.problem, self.solver, 0)
        last, done = state, 0
        arrays: Arrays = state.arrays
        while last.status == "running" and done < count:
            arrays, report = self.solver.step(self.problem, arrays)
            done += 1
            last = SolveState(state.iteration + done, arrays, 0.0, report.residual, report.status)
        return last


def solver_cases(solver: Solver) -> dict[str, SolverCase]:
    """Return the solver on each small problem that it takes: its own `example`, if it has one, and the catalog's."""
    own = solver.example
    sources = {} if own is None else {own.kind: own}
    sources |= {kind: PROBLEMS[kind].model_validate({"kind": kind, **fields}) for kind, fields in SMALL.items()}
    cases = {}
    for kind, source in sources.items():
        problem = loaded_problem(source)
        try:
            solver.check(problem)
        except UserError:
            continue
        cases[kind] = SolverCase(solver, problem)
    return cases


def a_problem_is_the_same_in_every_process(source: ProblemSource) -> None:
    """Load it twice, the second time through pickle."""
    again: ProblemSource = pickle.loads(pickle.dumps(source))
    require(loaded_problem(source).digest == loaded_problem(again).digest, "the same problem has another digest")


def a_problem_has_sizes(source: ProblemSource) -> None:
    """Look at the sizes that a run reports."""
    sizes = loaded_problem(source).sizes
    require(sizes, "it has no sizes")
    wrong: list[Any] = [size for size in sizes.values() if type(size) is not int or size < 1]
    require(not wrong, f"the sizes {wrong} are not positive integers")


def a_state_holds_arrays_of_numbers(case: SolverCase) -> None:
    """Look at the first state and at one after some iterations, as checkpoints keep them."""
    for state in (begin(case.problem, case.solver, 0), case.run()):
        arrays: Mapping[str, Any] = state.arrays
        wrong = [name for name, values in arrays.items() if not isinstance(values, np.ndarray)]
        require(not wrong, f"{', '.join(wrong)} is not an array")
        wrong = [name for name, values in arrays.items() if values.dtype.kind not in "biuf"]
        require(not wrong, f"{', '.join(wrong)} has values that a checkpoint cannot keep")


def a_resumed_solve_gives_the_same_answer(case: SolverCase) -> None:
    """Compare two times three iterations, through a checkpoint and another process's solver, with six."""
    state = case.run(count=_ITERATIONS // 2)
    tensors, metadata = state.packed()
    restored = SolveState.unpacked({name: values.copy() for name, values in tensors.items()}, metadata)
    resumed = SolverCase(pickle.loads(pickle.dumps(case.solver)), case.problem).run(
        restored, _ITERATIONS - state.iteration
    )
    whole = case.run()
    require(_answer(case, resumed) == _answer(case, whole), "the answer of a solve that was resumed differs")


def an_answer_changes_no_state(case: SolverCase) -> None:
    """Compare the state before and after its answer is taken and measured."""
    state = case.run()
    before = digest(state.arrays)
    metrics = measured(case.problem, case.solver, state)
    require(digest(state.arrays) == before, "the state after its answer is another one")
    require(metrics and all(isinstance(value, float) for value in metrics.values()), f"its metrics are {dict(metrics)}")


def residuals_are_numbers(case: SolverCase) -> None:
    """Look at the residual of some iterations."""
    residual = case.run().residual
    require(math.isfinite(residual) and residual >= 0, f"the residual is {residual}")


def _answer(case: SolverCase, state: SolveState) -> str:
    answer: Arrays = case.solver.answer(state.arrays)
    return digest(answer)


def digest_of_problem(source: ProblemSource) -> str:
    """Return the digest of the problem, loaded anew."""
    return loaded_problem(source).digest


def digest_of_solver(case: SolverCase) -> str:
    """Return the sha256 of the answer after some iterations."""
    return _answer(case, case.run())


PROBLEM_LAWS = (a_problem_is_the_same_in_every_process, a_problem_has_sizes)
SOLVER_LAWS = (
    a_state_holds_arrays_of_numbers,
    a_resumed_solve_gives_the_same_answer,
    an_answer_changes_no_state,
    residuals_are_numbers,
)
