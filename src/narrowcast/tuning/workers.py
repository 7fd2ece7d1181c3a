"""Trials as workers run them: experiments several together in lockstep, solves one by one.

A worker yields a message after each evaluation of an experiment, and after each measurement of a solve's answer.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from statistics import fmean
from typing import Any

from narrowcast.experiment import Experiment
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.loop import LocalBackend, Rounds, lockstep
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import Run, RunState, start
from narrowcast.platform.solving import Iteration, Problem, begin, iterations
from narrowcast.runs.learning import nothing_used
from narrowcast.runs.outputs import answer_sha256
from narrowcast.solve_run import Solve
from narrowcast.tuning.trials import Evaluation, SharedSource, TrialBatch, TrialSpec, reason_of


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
    return solve.problem.drawn and solve.problem.follows_seed


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
            for measurements in running.values():
                measurements.close()
            return


def _measurements(solve: Solve, problem: Problem) -> Generator[Iteration, None, None]:
    """Yield the iterations whose answers are measured; the last one alone has a state."""
    seconds = 0.0
    for iteration in iterations(problem, solve.solver, solve, begin(problem, solve.solver, solve.seed)):
        seconds += iteration.wall_seconds
        if iteration.metrics:
            yield Iteration(**{**vars(iteration), "wall_seconds": seconds})
            seconds = 0.0


def _row(trial: TrialSpec, solves: list[Solve], last: Mapping[int, Iteration], seconds: float) -> dict[str, Any]:
    rows = [
        {
            "iteration": iteration.step,
            "residual": iteration.residual,
            "solver_seconds": iteration.solver_seconds,
            **{
                name: value for name, value in iteration.metrics.items() if trial.on_test or selects(solves[seed], name)
            },
        }
        for seed, iteration in last.items()
    ]
    means = {name: fmean(row[name] for row in rows) for name in rows[0]}
    return {**means, "round": max(iteration.step for iteration in last.values()), "wall_seconds": seconds}


def _digests(solves: list[Solve], last: Mapping[int, Iteration]) -> tuple[str, ...]:
    """Return the sha256 of the answers of the solves that have ended."""
    return tuple(
        answer_sha256(solves[seed].solver.answer(iteration.state.arrays))
        for seed, iteration in last.items()
        if iteration.state is not None
    )


_KEPT = ("round", "loss", "total_uplink_bits", "total_downlink_bits", "total_bits", "simulated_seconds")


class SharedData(SharedSource):
    """The data set that all workers share."""

    def run_of(self, experiment: Experiment) -> Run:
        """Return the run of an experiment; raise `UserError` if its parts do not fit together."""
        return Run(experiment, experiment.secured_algorithm, experiment.task(self.loaded(experiment.data_source)))


def run_trials(batch: TrialBatch, shared: SharedData) -> Generator[list[Evaluation], Collection[int], None]:
    """Run trials and yield the evaluations of each round that has any; trials whose keys are sent back are stopped."""
    runs: list[Run] = []
    states: list[RunState] = []
    running: dict[int, tuple[TrialSpec, list[int]]] = {}
    for trial in batch.trials:
        try:
            of_trial = [shared.run_of(experiment) for experiment in trial.runs]
            begun = [start(run) for run in of_trial]
        except (Exception, SystemExit) as error:  # values that do not fit together, or a class of the user's
            yield [Evaluation(trial.key, None, failed=reason_of(error))]
            continue
        running[trial.key] = trial, list(range(len(runs), len(runs) + len(of_trial)))
        runs += of_trial
        states += begun
    seconds, used = [0.0] * len(runs), [False] * len(runs)
    rounds = _rounds_of(runs, states)
    ended: set[int] = set()
    while running:
        try:
            outcomes = rounds.send(ended or None)
        except RunFailed as error:  # of all of them, such as too little memory
            yield [Evaluation(key, None, failed=str(error)) for key in running]
            return
        for index, outcome in outcomes.items():
            if isinstance(outcome, Outcome):
                seconds[index] += outcome.wall_seconds
                used[index] = used[index] or outcome.record.delivered > 0
        evaluations = []
        for trial, indices in running.values():
            ran = [(runs[index], outcomes[index], seconds[index]) for index in indices]
            if evaluation := _evaluation(trial, batch.budget, ran):
                if evaluation.is_last and (idle := [index for index in indices if not used[index]]):
                    reason = _nothing_used(runs[idle[0]], outcomes[idle[0]])
                    evaluation = Evaluation(trial.key, None, failed=reason)
                evaluations.append(evaluation)
        stopped = (yield evaluations) if evaluations else ()
        over = {evaluation.key for evaluation in evaluations if evaluation.is_last or evaluation.failed} | set(stopped)
        ended = {index for key in over for index in running.pop(key)[1]}
    rounds.close()


def _nothing_used(run: Run, outcome: Outcome | RunFailed) -> str:
    assert isinstance(run.plan, Experiment)
    assert isinstance(outcome, Outcome), "its trial has an evaluation"
    return str(nothing_used(run.plan, [vars(outcome.ledger)], run))


def _rounds_of(runs: Sequence[Run], states: Sequence[RunState]) -> Rounds:
    """Run in lockstep, or under secure aggregation in turn, a round each, with a key store for each run."""
    if all(run.algorithm.secure_sums is None for run in runs):
        yield from lockstep(runs, states)
        return
    running = {
        index: LocalBackend().run(*run_and_state) for index, run_and_state in enumerate(zip(runs, states, strict=True))
    }
    try:
        while running:
            outcomes: dict[int, Outcome | RunFailed] = {}
            for index, rounds in running.items():
                try:
                    outcomes[index] = next(rounds)
                except (RunFailed, UserError) as error:
                    outcomes[index] = RunFailed(str(error))
            for index in (yield outcomes) or ():
                running.pop(index).close()
    finally:
        for rounds in running.values():
            rounds.close()


def _evaluation(
    trial: TrialSpec, budget: Mapping[str, float], ran: Sequence[tuple[Run, Outcome | RunFailed, float]]
) -> Evaluation | None:
    """Return the evaluation of a trial from its runs, their outcomes and seconds; None without any metrics."""
    rows: list[dict[str, Any]] = []
    digests: list[str] = []
    for run, outcome, seconds in ran:
        if isinstance(outcome, RunFailed):
            return Evaluation(trial.key, None, failed=str(outcome))
        if not outcome.metrics:
            return None
        record = outcome.record.row()
        # Trials are selected on validation, so their test metrics are dropped here, where they are measured.
        kept = {name: value for name, value in outcome.metrics.items() if trial.on_test or not name.startswith("test.")}
        rows.append({**{name: record[name] for name in _KEPT}, "wall_seconds": seconds, **kept})
        if outcome.state is not None:
            digests.append(model_sha256(run.algorithm, outcome.state))
    row = {name: sum(of_seed[name] for of_seed in rows) / len(rows) for name in rows[0]} | {"round": rows[0]["round"]}
    spent = any(row[column] >= limit for column, limit in budget.items())
    is_last = spent or row["round"] == ran[0][0].plan.rounds
    sources = (experiment.data_source for experiment in trial.runs)
    data = tuple((source, run.task.data.digest) for source, (run, *_) in zip(sources, ran, strict=True))
    return Evaluation(trial.key, row, is_last, tuple(digests) if is_last else (), data)
