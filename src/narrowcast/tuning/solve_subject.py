"""Solves as the subject of a study."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from narrowcast.cluster.ray_backend import RayBackend
from narrowcast.platform.config import plugin_folders
from narrowcast.platform.errors import UserError
from narrowcast.platform.iterations import begin, iterations, measured
from narrowcast.platform.overrides import Defaults
from narrowcast.platform.solver_contracts import ProblemSource
from narrowcast.solve_run import Solve, build_solve
from narrowcast.tuning.solve_trials import SharedProblem, run_solve_trials, selects
from narrowcast.tuning.study_settings import SOLVE_COSTS
from narrowcast.tuning.subject import Subject

_TIMED = 5  # iterations
_ENDS = ("iterations", "tolerance", "solver_seconds", "evaluate_every", "spacing")


class SolveSubject(Subject):
    """A study of solves: trials are chosen by the problem's metrics, by iterations and by the time of the solver.

    A metric of test is among them only if each seed draws another problem; the hold-out evaluation has new seeds.
    """

    section: ClassVar[str] = "solve"
    steps: ClassVar[str] = "iterations"
    model: ClassVar[type[Solve]] = Solve
    costs: ClassVar[Mapping[str, str]] = SOLVE_COSTS
    run_trials = staticmethod(run_solve_trials)

    def defaults(self, origin: str) -> Defaults:
        """Return the defaults of a solve that is read from a file."""
        return Defaults(Solve, plugin_folders(origin))

    def build(self, values: dict[str, Any], origin: str) -> Solve:
        """Return the validated solve."""
        return build_solve(values, origin)

    def of_worker(self, run: Solve) -> Solve:
        """Return the solve with measured iterations alone, and a state at its end alone."""
        return run.model_copy(
            update={"record_every": run.iterations, "checkpoint_every": None, "checkpoint_seconds": math.inf}
        )

    def identity(self, run: Solve) -> dict[str, Any]:
        """Return the solve's identity, when it ends and when it is measured."""
        return run.identity() | {name: getattr(run, name) for name in _ENDS}

    def source(self, run: Solve) -> ProblemSource:
        """Return the problem's source."""
        return run.problem_source

    def load(self, run: Solve) -> SharedProblem:
        """Load the problem."""
        return SharedProblem(run.problem_source, run.problem_source.load())

    def check(self, run: Solve, shared: SharedProblem) -> None:
        """Check the solver on the problem that is shared."""
        if run.problem_source == shared.source:
            run.solver.check(shared.data)

    def check_place(self, run: Solve, shared: SharedProblem, backend: RayBackend | None, together: int) -> None:
        """Check the cluster, and that trials are not to run as one program."""
        del run, shared
        if together > 1:
            raise UserError(
                f"study.trials_together = {together}: solves have no program in common; set study.parallel, for trials "
                "side by side on Ray"
            )
        if backend is not None:
            backend.check_workers("study.parallel")

    def selectable(self, run: Solve, shared: SharedProblem) -> tuple[list[str], Collection[str]]:
        """Return the metrics of the first state's answer that trials may be chosen by, and all of them."""
        problem = shared.problem_of(run)
        found = measured(problem, run.solver, begin(problem, run.solver, run.seed))
        return [name for name in found if selects(run, name)], found

    def measures(self, run: Solve) -> ProblemSource:
        """Return the problem."""
        return run.problem

    def timed(self, run: Solve, shared: SharedProblem) -> tuple[float, float]:
        """Time a few iterations and measurements."""
        problem = shared.problem_of(run)
        few = run.model_copy(update={"iterations": _TIMED, "evaluate_every": 1, "spacing": None})
        began = time.perf_counter()
        steps = list(iterations(problem, run.solver, few, begin(problem, run.solver, run.seed)))
        evaluation = sum(each.evaluate_seconds for each in steps) / len(steps)
        return (time.perf_counter() - began) / len(steps) - evaluation, evaluation
