"""The result of a study: its files, the choice among its trials, and the hold-out evaluation.

Trials are chosen by one objective, or from the Pareto front of several, whose knee is the chosen one. The hold-out
evaluation runs the best trials again, with seeds that no trial had, and measures them on the test split.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from narrowcast.cluster.worker_pool import RetryQueue
from narrowcast.platform.config import plugins
from narrowcast.platform.config.files import PLUGINS
from narrowcast.platform.config.trust import own_files, read_json
from narrowcast.platform.config.yaml import write_yaml
from narrowcast.platform.errors import RunFailed
from narrowcast.platform.storage.disk import write_atomically
from narrowcast.platform.storage.journal import STUDY_LOCK, AtWork, locked
from narrowcast.platform.tracking.metrics import FractionMetrics, format_metric, metric_label
from narrowcast.platform.tracking.study_sender import TrialRun
from narrowcast.platform.tracking.units import format_bits, format_seconds, format_short_seconds
from narrowcast.platform.types import FloatArray
from narrowcast.runs.folder import CONFIG, RESULT
from narrowcast.runs.significance import COMPARABLE_SEEDS
from narrowcast.tuning.client import StudyClient
from narrowcast.tuning.settings import COSTS, StudySettings, metric_names
from narrowcast.tuning.space import Space, edges
from narrowcast.tuning.study_file import StudyFile
from narrowcast.tuning.trials import Evaluation, TrialBatch, TrialRecord, TrialSpec

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, repr=False)
class StudyResult:
    """The result of a study: `best_trials`, the chosen one first, and the Pareto `front` of several objectives.

    `elsewhere` counts trials that other processes are still running; there are no hold-out evaluations before they end.
    """

    folder: Path
    records: Sequence[TrialRecord]
    best_trials: Sequence[TrialRecord] = ()
    front: Sequence[TrialRecord] = ()
    holdout: Sequence[HoldoutEvaluation] = ()
    elsewhere: int = 0
    files: Sequence[Path] = field(default_factory=tuple)
    shares: FractionMetrics = None
    """The metrics that are declared as shares."""
    cautions: Sequence[str] = ()
    """Advice to follow before the chosen trial stands for its method in a comparison."""

    def __repr__(self) -> str:
        states = Counter(record.state for record in self.records)
        counted = ", ".join(f"{count} {state}" for state, count in states.items()) or "none"
        lines = [f"{self.folder.name}: trials {counted}, in {self.folder}"]
        for trial in self.best_trials:
            chosen = "chosen" if trial is self.best else "next"
            lines.append(f"  {chosen}: trial {trial.number}  {format_params(trial.params)}")
        for held in self.holdout:
            means = ", ".join(
                f"{name} {format_metric(name, value, self.shares)}" for name, value in held.means().items()
            )
            lines.append(f"  hold-out evaluation of trial {held.trial.number}, {len(held.seeds)} new seeds: {means}")
        lines += [f"  {caution}" for caution in self.cautions]
        return "\n".join(lines)

    @property
    def best(self) -> TrialRecord | None:
        """Return the chosen trial; `best.yaml` in the folder is its experiment or solve."""
        return self.best_trials[0] if self.best_trials else None

    @property
    def trials(self) -> DataFrame:
        """Return all trials, a row each: number, state, rounds, ..., then parameters and metrics by name."""
        from pandas import DataFrame

        rows = []
        for record in self.records:
            plain = {name: value for name, value in vars(record).items() if name not in ("params", "metrics")}
            rows.append({**plain, **record.params, **record.metrics})
        return DataFrame(rows)

    @property
    def ended(self) -> int:
        """The number of trials that have ended."""
        return sum(record.state not in ("running", "waiting") for record in self.records)

    def metrics(self, objectives: Sequence[str], wall_seconds: float) -> dict[str, float]:
        """Return the metrics of the study's own MLflow run."""
        states = Counter(record.state for record in self.records)
        metrics = {f"trials_{state}": float(count) for state, count in states.items()}
        metrics |= {"rounds_run": float(sum(record.rounds for record in self.records)), "wall_seconds": wall_seconds}
        if self.best is not None:
            metrics |= {f"best.{name}": self.best.metrics[name] for name in objectives}
            metrics["best.trial"] = float(self.best.number)
        if self.holdout:
            metrics |= {f"best.{name}": value for name, value in self.holdout[0].means().items()}
        return metrics

    def plain(self, storage: str, wall_seconds: float) -> dict[str, Any]:
        """Return the contents of `result.json`."""
        return {
            "name": self.folder.name,
            "storage": storage,
            "trials": dict(Counter(record.state for record in self.records)),
            "rounds_run": sum(record.rounds for record in self.records),
            "wall_seconds": wall_seconds,
            "chosen": self.best.number if self.best else None,
            "best": [_plain(trial) for trial in self.best_trials],
            "pareto_front": [_plain(trial) for trial in self.front],
            "holdout": [evaluation.plain() for evaluation in self.holdout],
            "cautions": list(self.cautions),
        }

    def note(self, objectives: Mapping[str, str]) -> str:
        """Return the description of the study for its page in MLflow, in Markdown."""
        states = Counter(record.state for record in self.records)
        sought = " and ".join(f"{metric_label(name)} ({direction})" for name, direction in objectives.items())
        lines = [
            f"A study of {sought}: {', '.join(f'{count} {state}' for state, count in states.items())} trials. "
            "Its figures are under Artifacts, in `plots`; `best.yaml` there is the file of the chosen trial."
        ]
        if self.best is not None:
            reached = ", ".join(labelled(name, self.best.metrics[name], self.shares) for name in objectives)
            lines.append(f"Chosen: **trial {self.best.number}** with {reached}; `{format_params(self.best.params)}`")
        if self.holdout:
            first = self.holdout[0]
            on_test = ", ".join(labelled(name, value, self.shares) for name, value in first.means().items())
            lines.append(f"Hold-out evaluation with {len(first.seeds)} new seeds: {on_test} on average.")
        lines += self.cautions
        return "\n\n".join(lines)


def cautions_on(space: Space, chosen: TrialRecord, seeds: int) -> list[str]:
    """Return a line for each value of the chosen trial at the edge of its range, and one for fewer than three seeds."""
    lines = [
        f"{path} = {chosen.params[path]!r} is at the edge of its range, which ends at {end!r}; a better value may lie "
        f"beyond it: widen space.{path}"
        for path, end in edges(space, chosen.params).items()
    ]
    if seeds < COMPARABLE_SEEDS:
        tried = "one seed" if seeds == 1 else f"{seeds} seeds"
        lines.append(
            f"each trial had {tried}; for a comparison of tuned methods choose on {COMPARABLE_SEEDS} or more "
            f"(study.seeds={COMPARABLE_SEEDS})"
        )
    return lines


def _plain(trial: TrialRecord) -> dict[str, Any]:
    return {"trial": trial.number, "values": trial.params, **trial.metrics}


def why_no_trial_is_complete(name: str, trials: Sequence[TrialRecord]) -> str:
    """Return the error message of a study without a complete trial."""
    states = Counter(trial.state for trial in trials if trial.state != "lost")
    reasons = Counter(trial.reason for trial in trials if trial.state == "failed")
    if set(states) == {"failed"}:
        reason, times = reasons.most_common(1)[0]
        return (
            f"all {states['failed']} trials of {name} failed, {times} of them with: {reason}; "
            "narrow the space, and give the study another name"
        )
    counted = ", ".join(f"{count} {state}" for state, count in states.items()) or "none"
    return f"{name}: no trial is complete ({counted}); allow more trials or time, or use a milder pruner"


def format_value(name: str, value: float, shares: FractionMetrics = None) -> str:
    """Return a metric or cost with its unit; `shares` are the metrics that the model declares as such."""
    if name == "iterations":
        return f"{value:,.0f}"
    if name == "solver_seconds":
        return format_short_seconds(value)
    if name in COSTS:
        return format_bits(value) if name.endswith("bits") else format_seconds(value)
    return format_metric(name, value, shares)


def labelled(name: str, value: float, shares: FractionMetrics = None) -> str:
    """Return a metric or cost with its label: `validation accuracy 81.20 %`."""
    return f"{metric_label(name)} {format_value(name, value, shares)}"


def format_params(params: Mapping[str, Any]) -> str:
    """Return parameters in one line, each under the last part of its path."""
    return " ".join(
        f"{path.rpartition('.')[2]}={value:.4g}" if isinstance(value, float) else f"{path.rpartition('.')[2]}={value}"
        for path, value in params.items()
    )


_DECADES = 100.0


def objective_values(trials: Sequence[TrialRecord], objectives: Mapping[str, str]) -> FloatArray:
    """Return the objectives' values, [trials, objectives], negated where minimised, so that higher is better."""
    signs = np.array([1.0 if direction == "maximize" else -1.0 for direction in objectives.values()])
    values = [[trial.metrics[name] for name in objectives] for trial in trials]
    return signs * np.array(values, dtype=np.float64).reshape(len(trials), len(objectives))


def pareto_front(trials: Sequence[TrialRecord], objectives: Mapping[str, str]) -> list[TrialRecord]:
    """Return the feasible, complete trials that no other dominates, ordered by the first objective, best first."""
    usable = _usable(trials)
    values = objective_values(usable, objectives)
    dominated = [bool(((values >= value).all(axis=1) & (values > value).any(axis=1)).any()) for value in values]
    front = [index for index, lost in enumerate(dominated) if not lost]
    front.sort(key=lambda index: (*(-values[index]), usable[index].number))
    return [usable[index] for index in front]


def is_logarithmic(name: str, trials: Sequence[TrialRecord]) -> bool:
    """Return whether an objective is shown and weighed by its logarithm: a cost, or of solves one over two decades."""
    values = np.abs([trial.metrics[name] for trial in trials])
    if not (values > 0).all():
        return False
    of_solves = all("iterations" in trial.metrics for trial in trials)
    return name in COSTS or (of_solves and bool(values.max(initial=1.0) > _DECADES * values.min(initial=1.0)))


def knee(front: Sequence[TrialRecord], objectives: Mapping[str, str]) -> TrialRecord:
    """Return the trial with the largest sum of objectives, each scaled from 0 to 1 along the front.

    Costs, and errors of solves over more than two decades, are scaled by their logarithm. Of a front of one or two
    trials, return the first.
    """
    values = objective_values(front, objectives)
    for column, name in enumerate(objectives):
        if is_logarithmic(name, front):
            values[:, column] = np.sign(values[:, column]) * np.log(np.abs(values[:, column]))
    span = values.max(axis=0) - values.min(axis=0)
    scaled = (values - values.min(axis=0)) / np.where(span > 0, span, 1)
    return front[int(scaled.sum(axis=1).argmax())] if len(front) > 2 else front[0]


def best_trials(trials: Sequence[TrialRecord], settings: StudySettings) -> list[TrialRecord]:
    """Return the trials for hold-out evaluation, at least one, the chosen one first.

    Of one objective these are the best; of several, the knee of the front and others spread evenly along it.
    """
    objectives, at_most = settings.objectives, max(1, settings.holdout.trials)
    if len(objectives) > 1:
        front = pareto_front(trials, objectives)
        if not front:
            return []
        chosen = knee(front, objectives)
        alternatives = [trial for trial in front if trial is not chosen]
        spread = np.linspace(0, len(alternatives) - 1, at_most - 1).round() if alternatives else np.empty(0)
        return [chosen, *(alternatives[index] for index in sorted(set(spread.astype(int).tolist())))]
    usable = _usable(trials)
    values = objective_values(usable, objectives)
    order = sorted(range(len(usable)), key=lambda index: (-values[index, 0], usable[index].number))
    return [usable[index] for index in order[:at_most]]


def _usable(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    return [trial for trial in trials if trial.state == "complete" and trial.feasible]


logger = logging.getLogger(__name__)
FILE, JOURNAL, TABLE, BEST = "study.yaml", "study.journal", "trials.csv", "best.yaml"
_CLOSING, _POLL_SECONDS = "closing.lock", 0.2


@dataclass(frozen=True)
class StudyFolder:
    """The folder OUTPUT/NAME of a study: table and results, a folder for each trial, and the hold-out evaluations."""

    path: Path

    @contextmanager
    def closing(self, observe: Callable[[str], None]) -> Iterator[None]:
        """Wait until no other process of the study writes its result, and keep others waiting within the block.

        The last one then has all trials. `observe` is told if it has to wait.
        """
        with ExitStack() as stack:
            for attempt in count():
                try:
                    stack.enter_context(locked(self.path, _CLOSING))
                    break
                except AtWork:
                    if not attempt:
                        observe("another process is writing the study's result; waiting for it")
                    time.sleep(_POLL_SECONDS)
            yield

    def write_yaml(self, name: str, values: Mapping[str, Any]) -> Path:
        """Write nested plain values atomically, and the modules of the user's own classes; return the file's path."""
        path, text = self.path / name, io.StringIO()
        write_yaml(values, text)
        plugins.keep(values, path.parent / PLUGINS)
        write_atomically(path, text.getvalue().encode())
        return path

    def write_json(self, name: str, values: Any) -> None:
        """Write plain values atomically as JSON."""
        write_atomically(self.path / name, json.dumps(values, indent=2).encode())

    def write_trial(
        self, trial: TrialRecord, config: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], digests: Sequence[str]
    ) -> None:
        """Write the config that repeats the trial with `narrowcast run`, its evaluations, and its result."""
        folder = of_trial(trial.number)
        self.write_yaml(f"{folder}/{CONFIG}", config)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        write_atomically(self.path / folder / "rounds.jsonl", lines.encode())
        self.write_json(f"{folder}/{RESULT}", {**trial_entries(trial), "model_sha256": list(digests)})

    def read_rounds(self, number: int) -> tuple[Mapping[str, Any], ...]:
        """Return the evaluations of a trial; none if another machine's folder has them, or if they are damaged."""
        path = self.path / of_trial(number) / "rounds.jsonl"
        try:
            rows = tuple(map(json.loads, path.read_text().splitlines()))
            if all(isinstance(row["round"], int) and isinstance(row["logged_at_ms"], int) for row in rows):
                return rows
            damage = "no rounds"
        except OSError:
            return ()
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            damage = str(error)
        logger.warning("%s is damaged (%s); the trial is taken to have no rounds", path, damage)
        return ()

    def write_table(self, trials: Sequence[TrialRecord], paths: Iterable[str]) -> Path:
        """Write `trials.csv`; return its path."""
        write_atomically(self.path / TABLE, table_text(trials, paths).encode())
        return self.path / TABLE

    def holdout(self, number: int, offset: int) -> Path:
        """Return the file of a trial's hold-out evaluation with the seed so many above the experiment's."""
        return self.path / "holdout" / f"trial-{number}-seed-{offset}.json"

    def artifacts(self) -> Iterator[tuple[Path, str | None]]:
        """Yield what goes to MLflow, with its folder: all but the trials, which have their runs, and the journal."""
        for path in own_files(self.path):
            relative = path.relative_to(self.path)
            if relative.parts[0] not in ("trials", JOURNAL, _CLOSING, STUDY_LOCK) and path.suffix != ".part":
                yield path, None if len(relative.parts) == 1 else relative.parent.as_posix()


def trial_entries(trial: TrialRecord) -> dict[str, Any]:
    """Return the entries of a trial's `result.json`, but for the sha256 of its models."""
    return {
        "trial": trial.number,
        "state": trial.state,
        "values": trial.params,
        "amounts": dict(trial.metrics),
        "rounds": trial.rounds,
        "feasible": trial.feasible,
        "reason": trial.reason,
        "retry_of": trial.retry_of,
    }


def table_text(trials: Sequence[TrialRecord], paths: Iterable[str]) -> str:
    """Return the trials as CSV, with a column for each dimension's path and each metric."""
    paths = list(paths)
    metrics = list(dict.fromkeys(name for trial in trials for name in trial.metrics))
    columns = ("trial", "state", "rounds", "feasible", "wall_seconds", "retry_of", "reason")
    writer = csv.writer(stream := io.StringIO(newline=""))
    writer.writerow([*columns, *paths, *metrics])
    for trial in trials:
        row: list[Any] = [trial.number, trial.state, trial.rounds, trial.feasible, round(trial.wall_seconds, 3)]
        row += ["" if trial.retry_of is None else trial.retry_of, trial.reason]
        row += [trial.params.get(path, "") for path in paths]
        writer.writerow([*row, *(trial.metrics.get(name, "") for name in metrics)])
    return stream.getvalue()


def of_trial(number: int) -> str:
    """Return the place of a trial's files in the folder of its study."""
    return f"trials/{number:05d}"


@dataclass(frozen=True)
class HoldoutEvaluation:
    """A trial and the last evaluations of its new runs, one for each seed."""

    trial: TrialRecord
    seeds: Sequence[int]
    rows: Sequence[Mapping[str, float]]

    def metric(self, name: str) -> tuple[float, float]:
        """Return the mean and the standard deviation (n - 1) over the seeds, NaN for a single seed."""
        values = [row[name] for row in self.rows]
        return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")

    def means(self) -> dict[str, float]:
        """Return all test metrics, averaged over the seeds; all metrics of a problem that has none of test."""
        names = metric_names(self.rows[0])
        return {name: self.metric(name)[0] for name in [name for name in names if name.startswith("test.")] or names}

    def plain(self) -> dict[str, Any]:
        """Return the plain values for `result.json`."""
        return {"trial": self.trial.number, "seeds": list(self.seeds), "runs": [dict(row) for row in self.rows]}


class HoldoutQueue(RetryQueue[TrialBatch, int]):
    """The hold-out runs that the study's folder does not have yet, as a queue for `dispatch`."""

    def __init__(self, file: StudyFile, best: Sequence[TrialRecord], folder: StudyFolder, client: StudyClient) -> None:
        self._file, self._best, self._client = file, best, client
        self._seeds = range(file.settings.seeds, file.settings.seeds + file.settings.holdout.seeds)
        self._runs = [(trial, offset) for trial in best for offset in self._seeds]
        self._paths = [folder.holdout(trial.number, offset) for trial, offset in self._runs]
        super().__init__(key for key, path in enumerate(self._paths) if not path.is_file())

    def job(self, key: int) -> TrialBatch:
        """Return a run."""
        trial, offset = self._runs[key]
        spec = TrialSpec(key, (self._file.build(trial.params, offset),), on_test=True)
        return TrialBatch((spec,), self._file.settings.budget_columns)

    def answer_to(self, message: Sequence[Evaluation]) -> list[int]:
        """Write the last evaluation of a run; raise `RunFailed` if it failed, and `UserError` for other data."""
        for evaluation in message:
            for source, sha256 in evaluation.data:
                self._client.check_data(source, sha256)
            if evaluation.row is None:
                raise RunFailed(f"trial {self._runs[evaluation.key][0].number} with another seed: {evaluation.failed}")
            if evaluation.is_last:
                row = {**evaluation.row, "logged_at_ms": int(time.time() * 1000)}
                write_atomically(self._paths[evaluation.key], json.dumps(row).encode())
        return []

    def key(self, job: TrialBatch) -> int:
        """Return the number of a run."""
        (spec,) = job.trials
        return spec.key

    def give_up(self, key: int, reason: str) -> None:
        """Raise `RunFailed`."""
        raise RunFailed(f"hold-out evaluation of trial {self._runs[key][0].number}: {reason}")

    def results(self) -> list[HoldoutEvaluation]:
        """Return the evaluations, the chosen trial's first."""
        remedy = "remove it, then give the same command, which repeats this evaluation"
        rows = iter([read_json(path, remedy) for path in self._paths])
        return [HoldoutEvaluation(trial, list(self._seeds), [next(rows) for _ in self._seeds]) for trial in self._best]

    def tracked_runs(self, results: Sequence[HoldoutEvaluation]) -> list[TrialRun]:
        """Return the runs as MLflow is to have them."""
        return [
            TrialRun(
                key=f"{result.trial.number}-test-{offset}",
                name=f"{result.trial.number:03d}-test-seed-{offset}-{self._file.name}",
                state="complete",
                params=result.trial.params,
                tags={"holdout_of": str(result.trial.number)},
                rows=(row,),
            )
            for result in results
            for offset, row in zip(result.seeds, result.rows, strict=True)
        ]
