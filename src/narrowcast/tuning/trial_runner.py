"""The trials of a study as a worker plays them: together, in lockstep, handing on each evaluation."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from narrowcast.experiment import Experiment
from narrowcast.platform.contracts import Dataset
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.evaluation import model_sha256
from narrowcast.platform.local_backend import LocalExecutor
from narrowcast.platform.outcome import Outcome
from narrowcast.platform.rounds import Rounds, lockstep, rounds
from narrowcast.platform.run import Run

# Spent so far, beside what an evaluation measures.
_KEPT = ("round", "loss", "total_uplink_bits", "total_downlink_bits", "simulated_seconds")


@dataclass(frozen=True)
class Job:
    """A trial: the experiment with its values, once for each seed. Test metrics are left out unless asked for."""

    key: int
    experiments: tuple[Experiment, ...]
    tested: bool = False


@dataclass(frozen=True)
class Jobs:
    """What a worker plays at once; `budget` is by column of a round's row."""

    jobs: tuple[Job, ...]
    budget: Mapping[str, float]


@dataclass(frozen=True)
class Step:
    """An evaluation of a trial: a row of means over its seeds, and each seed's own; or why there is none."""

    key: int
    row: dict[str, Any] | None
    seeds: tuple[dict[str, Any], ...] = ()
    over: bool = False
    failed: str = ""
    model_sha256: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shared:
    """The data set, and the source that it was read from."""

    source: Any
    data: Dataset


def play_jobs(jobs: Jobs, shared: Shared) -> Generator[list[Step], Collection[int], None]:
    """Play trials and yield a list of steps after every round with an evaluation; ends those whose keys are sent."""
    runs: list[Run] = []
    places: dict[int, list[int]] = {}
    failed = []
    for job in jobs.jobs:
        try:
            made = [_run(experiment, shared) for experiment in job.experiments]
        except UserError as error:  # values that are fine one by one and not together
            failed.append(Step(job.key, None, failed=str(error)))
            continue
        places[job.key] = list(range(len(runs), len(runs) + len(made)))
        runs += made
    if failed:
        yield failed
    seconds = [0.0] * len(runs)
    loop: Rounds = _alone(runs[0]) if len(runs) == 1 else lockstep(runs)
    ended: set[int] = set()
    while True:
        try:
            outcomes = loop.send(ended or None)
        except StopIteration:
            return
        for place, outcome in outcomes.items():
            seconds[place] += outcome.wall_seconds if isinstance(outcome, Outcome) else 0.0
        steps = []
        for key, its_places in places.items():
            if its_places[0] in outcomes:
                its_outcomes, its_seconds = (
                    [outcomes[each] for each in its_places],
                    [seconds[each] for each in its_places],
                )
                step = _step(jobs, key, [runs[each] for each in its_places], its_outcomes, its_seconds)
                steps += [step] if step else []
        stopped = (yield steps) if steps else ()
        over = {step.key for step in steps if step.over or step.failed} | set(stopped)
        ended = {place for key in over for place in places[key]}
        places = {key: its_places for key, its_places in places.items() if key not in over}
        if not places:
            loop.close()
            return


def _run(experiment: Experiment, shared: Shared) -> Run:
    task = experiment.task(shared.data if experiment.data == shared.source else experiment.data.load())
    return Run(experiment, experiment.algorithm, task)


def _alone(run: Run) -> Rounds:
    try:
        for outcome in rounds(run, LocalExecutor(run)):
            yield {0: outcome}
    except RunFailed as error:
        yield {0: error}


def _step(
    jobs: Jobs,
    key: int,
    runs: Sequence[Run],
    outcomes: Sequence[Outcome | RunFailed],
    seconds: Sequence[float],
) -> Step | None:
    """What a round came to for a trial; None where nothing was measured."""
    rows: list[dict[str, Any]] = []
    digests: list[str] = []
    tested = next(job.tested for job in jobs.jobs if job.key == key)
    for run, outcome, spent in zip(runs, outcomes, seconds, strict=True):
        if isinstance(outcome, RunFailed):
            return Step(key, None, failed=str(outcome))
        if not outcome.metrics:
            return None
        record = asdict(outcome.record)
        # What is tuned is chosen on validation: nobody sees what it would have scored on test.
        metrics = {name: value for name, value in outcome.metrics.items() if tested or not name.startswith("test.")}
        rows.append({**{name: record[name] for name in _KEPT}, "wall_seconds": spent, **metrics})
        if outcome.state is not None:
            digests.append(model_sha256(run.algorithm, outcome.state))
    mean = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    row = {**mean, "round": rows[0]["round"]}
    spent_all = any(row[column] >= limit for column, limit in jobs.budget.items())
    over = row["round"] == runs[0].plan.rounds or spent_all
    return Step(key, row, tuple(rows), over, "", tuple(digests) if over else ())
