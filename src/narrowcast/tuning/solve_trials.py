"""Trials of solves as a worker runs them, with a message after each measurement of the answer."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from statistics import fmean
from typing import Any

from narrowcast.platform.iterations import Iteration, begin, iterations
from narrowcast.platform.kinds import optional
from narrowcast.platform.solver_contracts import Problem
from narrowcast.runs.solve_outputs import answer_sha256
from narrowcast.solve_run import Solve
from narrowcast.tuning.shared_source import SharedSource
from narrowcast.tuning.trial_messages import Evaluation, TrialBatch, TrialSpec, reason_of


class SharedProblem(SharedSource):
    """The problem that all workers share."""

    def problem_of(self, solve: Solve) -> Problem:
        """Return the problem of a solve; raise `UserError` if its solver does not take it."""
        problem: Problem = self.loaded(solve.problem_source)
        solve.solver.check(problem)
        return problem


def selects(solve: Solve, metric: str) -> bool:
    """Return whether trials may be chosen by a metric: by one of test only if another seed draws another problem."""
    return not metric.startswith("test.") or is_drawn(solve)


def is_drawn(solve: Solve) -> bool:
    """Return whether each seed of the solve draws a problem of its own, so that other seeds test what was chosen."""
    return bool(optional(solve.problem, "drawn")) and optional(solve.problem, "seed", 0) is None


def run_solve_trials(batch: TrialBatch, shared: SharedProblem) -> Generator[list[Evaluation], Collection[int], None]:
    """Run trials one after the other; yield each one's evaluations until its key is sent back."""
    for trial in batch.trials:
        try:
            yield from _evaluations(trial, batch.budget, shared)
        except (Exception, SystemExit) as error:
            yield [Evaluation(trial.key, None, failed=reason_of(error))]


def _evaluations(
    trial: TrialSpec, budget: Mapping[str, float], shared: SharedProblem
) -> Generator[list[Evaluation], Collection[int], None]:
    """Run the solves of a trial side by side; one that has ended keeps its last measurement."""
    solves: list[Solve] = list(trial.runs)
    problems = [shared.problem_of(solve) for solve in solves]
    data = tuple((solve.problem_source, problem.digest) for solve, problem in zip(solves, problems, strict=True))
    running = {seed: _measurements(solve, problems[seed]) for seed, solve in enumerate(solves)}
    last: dict[int, Iteration] = {}
    seconds = 0.0
    while True:
        for seed in list(running):
            measured = next(running[seed])
            last[seed], seconds = measured, seconds + measured.wall_seconds
            if measured.state is not None:
                running.pop(seed).close()
        row = _row(trial, solves, last, seconds / len(solves))
        is_last = not running or any(row[column] >= limit for column, limit in budget.items())
        stopped = yield [Evaluation(trial.key, row, is_last, _digests(solves, last) if is_last else (), data)]
        if is_last or trial.key in (stopped or ()):
            for each in running.values():
                each.close()
            return


def _measurements(solve: Solve, problem: Problem) -> Generator[Iteration, None, None]:
    """Yield the iterations whose answers are measured; the last one alone has a state."""
    seconds = 0.0
    for each in iterations(problem, solve.solver, solve, begin(problem, solve.solver, solve.seed)):
        seconds += each.wall_seconds
        if each.metrics:
            yield Iteration(**{**vars(each), "wall_seconds": seconds})
            seconds = 0.0


def _row(trial: TrialSpec, solves: list[Solve], last: Mapping[int, Iteration], seconds: float) -> dict[str, Any]:
    rows = [
        {
            "iteration": each.step,
            "residual": each.residual,
            "solver_seconds": each.solver_seconds,
            **{name: value for name, value in each.metrics.items() if trial.on_test or selects(solves[seed], name)},
        }
        for seed, each in last.items()
    ]
    means = {name: fmean(row[name] for row in rows) for name in rows[0]}
    return {**means, "round": max(each.step for each in last.values()), "wall_seconds": seconds}


def _digests(solves: list[Solve], last: Mapping[int, Iteration]) -> tuple[str, ...]:
    """Return the sha256 of the answers of the solves that have ended."""
    return tuple(
        answer_sha256(solves[seed].solver.answer(each.state.arrays))
        for seed, each in last.items()
        if each.state is not None
    )
