"""The checks of a solve before anything is written, and the solve as the recorder sees it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from narrowcast import packaged
from narrowcast._version import __version__
from narrowcast.platform.errors import UserError
from narrowcast.platform.iterations import Iteration, SolveState, begin, iterations, measured
from narrowcast.platform.solver_contracts import Problem
from narrowcast.platform.tracking.journal import Journal
from narrowcast.platform.tracking.metric_labels import shares_of
from narrowcast.platform.tracking.targets import check_targets
from narrowcast.runs.outputs import git_commit
from narrowcast.runs.recordable import PreparedRun, WriteOutputs
from narrowcast.runs.run_folder import CONFIG, has_run
from narrowcast.runs.run_place import check_same_data, checked_store, new_place, to_resume
from narrowcast.runs.solve_outputs import write_solve_outputs
from narrowcast.solve_run import Solve, load_solve, load_solves

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PreparedSolve(PreparedRun):
    """A solve that has passed every check and has written nothing yet."""

    solve: Solve
    problem: Problem
    state: SolveState
    labels: Mapping[str, str] = field(default_factory=dict)
    """More tags of the run in MLflow."""

    @property
    def config(self) -> Solve:
        """The solve."""
        return self.solve

    @property
    def input(self) -> Problem:
        """The problem."""
        return self.problem

    def tags(self) -> dict[str, str]:
        """Return the tags of the run in MLflow."""
        return {
            "solver": self.solve.solver.kind,
            "problem": self.problem.name,
            "seed": str(self.solve.seed),
            "git_commit": git_commit() or "unknown",
            "narrowcast_version": __version__,
            **self.labels,
        }

    def steps(self) -> Generator[Iteration, None, None]:
        """Run the iterations after `state` and yield those that are recorded."""
        return iterations(self.problem, self.solve.solver, self.solve, self.state)

    def watch(self, journal: Journal) -> Callable[[Iteration], None]:
        """Return the function to be called after each recorded iteration."""
        del journal

        def watch(iteration: Iteration) -> None:
            if logger.isEnabledFor(logging.INFO):
                about = {"run": self.folder.name, "iteration": iteration.step, "residual": iteration.residual}
                logger.info("iteration %d", iteration.step, extra={**about, "metrics": iteration.metrics})

        return watch

    def begin_outputs(self) -> WriteOutputs:
        """Return the function that writes the outputs of the finished solve."""

        def write(journal: Journal, state: SolveState, run_id: str) -> dict[str, Any]:
            return write_solve_outputs(self.folder, self.solve, self.problem, journal, state, run_id)

        return write


def prepare_solve(solve: Solve, output: Path, problem: Problem | None = None) -> PreparedSolve:
    """Check a new solve, make its first state and choose its folder; `problem` is loaded here unless given."""
    problem, state = _begun(solve, problem)
    folder, store = new_place(solve, output)
    return PreparedSolve(solve=solve, problem=problem, state=state, folder=folder, store=store)


def resume_solve(folder: Path, changed: Solve | None, problem: Problem | None = None) -> PreparedSolve:
    """Check a solve that is to be resumed; `changed` may differ only in settings that results do not depend on.

    `problem` is loaded here unless given.
    """
    solve, kept, journal = to_resume(folder, changed, load_solve, SolveState)
    if solve.iterations < (written := journal.last_step):
        raise UserError(
            f"{folder.name} has finished {written} iterations already and iterations = {solve.iterations}; raise "
            "iterations"
        )
    if kept is None:
        problem, state = _begun(solve, problem)
    else:
        problem = problem or solve.problem_source.load()
        check_same_data(folder, kept, problem)
        problem, state = _checked(solve, problem), kept.state
        if written > state.step:
            state = replace(state, settled=(written, float(journal.rounds[-1]["solver_seconds"])))
    store = checked_store(solve, folder.parent)
    return PreparedSolve(solve=solve, problem=problem, state=state, folder=folder, store=store, resuming=True)


def _checked(solve: Solve, problem: Problem | None = None) -> Problem:
    """Return the problem after the check that the solver takes it."""
    problem = problem or solve.problem_source.load()
    solve.solver.check(problem)
    return problem


def _begun(solve: Solve, problem: Problem | None = None) -> tuple[Problem, SolveState]:
    """Return the problem and the first state, whose answer is measured only if there are targets."""
    problem = _checked(solve, problem)
    state = begin(problem, solve.solver, solve.seed)
    if solve.targets:
        metrics = measured(problem, solve.solver, state)
        check_targets(solve.targets, metrics, shares_of(solve.problem) or ())
    return problem, state


def are_solves(source: object, folders: Sequence[Path]) -> bool:
    """Return whether a file, a mapping, an object or, without them, the runs to be resumed are solves."""
    if isinstance(source, str | Mapping):
        return packaged.names_solve(source)
    if source is not None or not folders:
        return isinstance(source, Solve)
    config = folders[0] / CONFIG
    return config.is_file() and packaged.names_solve(str(config))


def prepare_solves(
    source: Any, overrides: Sequence[str], output: Path, folders: Sequence[Path], *, resume_if_begun: bool
) -> list[PreparedSolve]:
    """Prepare a solve, once for each replica, or those in `folders`; see `session.prepare_runs`."""
    if folders:
        return [_named(folder, source, overrides) for folder in folders]
    solves = load_solves(source, overrides)
    if resume_if_begun and len(solves) == 1 and has_run(output / solves[0].name):
        return [resume_solve(output / solves[0].name, solves[0])]
    problems = {repr(each.problem_source): each.problem_source for each in solves}
    loaded = {key: source.load() for key, source in problems.items()}
    return [prepare_solve(each, output, loaded[repr(each.problem_source)]) for each in solves]


def _named(folder: Path, source: Any, overrides: Sequence[str]) -> PreparedSolve:
    config = folder / CONFIG
    changes = source is not None or (overrides and config.is_file())
    return resume_solve(folder, load_solve(str(config) if source is None else source, overrides) if changes else None)
