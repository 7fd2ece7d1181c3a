"""Verification of a study: its files follow from the trials' own, and trials, run again, have the same evaluations."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import optuna

from narrowcast.platform.config.trust import is_looking, read_json, remedy
from narrowcast.platform.config.yaml import read_limited, read_yaml
from narrowcast.platform.errors import UserError
from narrowcast.runs.checks import Budget, Check, difference
from narrowcast.runs.folder import CONFIG, RESULT
from narrowcast.runs.run_verification import UNPROVABLE
from narrowcast.runs.verification import code_in, guarded
from narrowcast.tuning.client import DIGEST, data_key
from narrowcast.tuning.result import (
    BEST,
    FILE,
    JOURNAL,
    TABLE,
    HoldoutEvaluation,
    StudyFolder,
    StudyResult,
    best_trials,
    cautions_on,
    of_trial,
    pareto_front,
    table_text,
    trial_entries,
)
from narrowcast.tuning.settings import COSTS, trial_metrics
from narrowcast.tuning.storage import open_storage
from narrowcast.tuning.study_file import StudyFile, load_study
from narrowcast.tuning.trials import Evaluation, TrialBatch, TrialRecord, TrialSpec, trial_records

_MEASURED = ("wall_seconds", "logged_at_ms", "solver_seconds")
"""Columns of an evaluation that another run measures anew."""
_STORAGE_SECONDS = 5.0
_UNPROVABLE = f"values that the sampler drew, reasons of failures; {UNPROVABLE}"
Row = Mapping[str, Any]


def verify_study(folder: Path, budget: Budget) -> Iterator[Check]:
    """Yield the checks of a study, of which trials are repeated within the budget: the chosen one first."""
    if is_looking() and (code := code_in(folder / FILE)):
        yield from guarded(_without_code(folder, code))
        return
    with TemporaryDirectory(prefix="narrowcast-study-") as copies:
        yield from guarded(_StudyVerification(folder, load_study(str(folder / FILE)), Path(copies))(budget))


def _without_code(folder: Path, code: str) -> Iterator[Check]:
    """Yield the check that needs no class: the table against the trials' own files."""
    space = read_yaml(read_limited(folder / FILE), FILE)["space"]
    yield _table_check(folder, _records_of_files(folder), list(space), timed=False, ended=True)
    reason = f"{code} is code of the study's own, which looking does not run; {remedy(folder)}"
    yield Check("everything else", skipped=reason)


@dataclass(frozen=True)
class _Repeatable:
    """Runs of a trial, or one of its hold-out evaluation, that can be made again; `rows` are its evaluations."""

    name: str
    spec: TrialSpec
    rows: Sequence[Row]
    digests: Sequence[str] | None
    ended: bool

    @property
    def steps(self) -> int:
        """The rounds or iterations of all its runs."""
        return int(self.rows[-1]["round"]) * len(self.spec.runs)

    @property
    def seconds(self) -> float:
        """The time that they took."""
        return float(self.rows[-1]["wall_seconds"]) * len(self.spec.runs)


@dataclass
class _StudyVerification:
    folder: Path
    file: StudyFile
    copies: Path
    attributes: dict[str, Any] = field(default_factory=dict)
    """Those that the storage has of the study itself."""

    def __call__(self, budget: Budget) -> Iterator[Check]:
        yield from self._journal_itself()
        records = self._records
        yield from self._trials(records)
        holdout = self._holdout(records)
        ended = self._has_ended(records, holdout)
        timed, paths = bool(self.attributes), list(self.file.space.dimensions)
        of_trials = records if timed else _records_of_files(self.folder)
        yield _table_check(self.folder, of_trials, paths, timed=timed, ended=ended)
        yield from self._result(records, holdout, ended=ended)
        yield from self._repeated(records, holdout, budget)
        yield Check("the rest", skipped=_UNPROVABLE)

    def _journal_itself(self) -> Iterator[Check]:
        """Read the trials from a copy of the study's own journal; from a database elsewhere nothing is read."""
        compared = f"its study against {FILE}"
        if self.file.settings.storage is not None or not (self.folder / JOURNAL).is_file():
            yield Check(JOURNAL, skipped="the study's storage is elsewhere; its trials are read from their own files")
            return
        try:
            storage = open_storage(str(shutil.copy(self.folder / JOURNAL, self.copies)), _STORAGE_SECONDS)
            study = optuna.load_study(study_name=self.file.name, storage=storage)
            trials = study.get_trials()
        except (UserError, KeyError) as error:
            yield Check(JOURNAL, compared, str(error).replace(str(self.copies), str(self.folder)))
            return
        self.attributes = {**study.user_attrs, DIGEST: study.user_attrs.get(DIGEST, "")}
        known = self.attributes[DIGEST] == self.file.digest()
        problem = "" if known else f"it was begun with another file than {FILE}"
        self._records = trial_records(trials, self.file.space)
        names = list(self.file.settings.objectives)
        for record in self._records:
            values = [record.metrics.get(name) for name in names]
            if record.state == "complete" and trials[record.number].values != values:
                problem = problem or f"trial {record.number}: its objectives are not those of its metrics"
        yield Check(JOURNAL, f"{compared}, and objectives against metrics", problem)

    @cached_property
    def _records(self) -> list[TrialRecord]:
        """The trials; without a journal those with files here, and of others, such as lost ones, what the table has."""
        by_number = {
            record.number: record for record in (*_records_of_table(self.folder), *_records_of_files(self.folder))
        }
        return [by_number[number] for number in sorted(by_number)]

    def _trials(self, records: Sequence[TrialRecord]) -> Iterator[Check]:
        """Compare the files of each trial with its record, and its metrics with its evaluations."""
        ended = [record for record in records if record.state in ("complete", "pruned", "failed")]
        filed = [record for record in ended if (self.folder / of_trial(record.number) / RESULT).is_file()]
        problem = next((f"trial {record.number}: {why}" for record in filed if (why := self._other_trial(record))), "")
        yield Check("trials", f"the files of {len(filed)} trials against {JOURNAL} and {FILE}", problem)
        if missing := [str(record.number) for record in ended if record not in filed]:
            yield Check("other trials", skipped=f"trials {', '.join(missing)} have no files here")

    def _other_trial(self, record: TrialRecord) -> str:
        folder = self.folder / of_trial(record.number)
        if not (entries := _json_in(folder / RESULT)):
            return f"its {RESULT} is unreadable"
        wrong, rows = difference(entries, trial_entries(record)), StudyFolder(self.folder).read_rounds(record.number)
        if not wrong and record.metrics and (not rows or trial_metrics(rows[-1]) != dict(record.metrics)):
            wrong = "its metrics are not those of its last evaluation"
        for before, row in pairwise(rows):
            costs = [name for name in ("round", *COSTS.values()) if _is_less(row.get(name), before.get(name))]
            wrong = wrong or (f"round {row['round']}: {costs[0]} is less than before" if costs else "")
        if wrong or not rows:
            return wrong
        steps = int(rows[-1]["round"]) if record.state != "pruned" else None
        known = [self._identity(self.file.run_with(record.params, **lengths)) for lengths in self._lengths(steps)]
        return "" if self._identity_of_file(folder / CONFIG) in known else f"its {CONFIG} does not have its values"

    def _lengths(self, steps: int | None) -> list[dict[str, int]]:
        return [{}] if steps is None else [{self.file.subject.steps: steps}, {}]

    def _identity(self, run: Any) -> dict[str, Any]:
        return {**self.file.subject.identity(run), "seed": run.seed}

    def _identity_of_file(self, path: Path) -> dict[str, Any]:
        values = read_yaml(read_limited(path), str(path))
        return self._identity(self.file.subject.build(values, str(path)))

    def _best(self, records: Sequence[TrialRecord]) -> list[TrialRecord]:
        return best_trials(records, self.file.settings)

    def _holdout(self, records: Sequence[TrialRecord]) -> list[HoldoutEvaluation]:
        """Return the hold-out evaluations that the folder has of the best trials."""
        settings, files = self.file.settings, StudyFolder(self.folder)
        if not settings.holdout.trials or not (self.folder / "holdout").is_dir():
            return []
        seeds = range(settings.seeds, settings.seeds + settings.holdout.seeds)
        evaluations = []
        for trial in self._best(records):
            paths = [files.holdout(trial.number, offset) for offset in seeds]
            rows = [row for path in paths if (row := _json_in(path))]
            if len(rows) == len(paths):
                evaluations.append(HoldoutEvaluation(trial, list(seeds), rows))
        return evaluations

    def _has_ended(self, records: Sequence[TrialRecord], holdout: Sequence[HoldoutEvaluation]) -> bool:
        """Return False if a study was interrupted: trials are left to run, or to be evaluated on test."""
        if any(record.state in ("running", "waiting") for record in records):
            return False
        return not self.file.settings.holdout.trials or len(holdout) == len(self._best(records))

    def _result(
        self, records: Sequence[TrialRecord], holdout: Sequence[HoldoutEvaluation], *, ended: bool
    ) -> Iterator[Check]:
        """Compare what is said of the best trials with all trials, and the file of the chosen one with its values."""
        path = self.folder / RESULT
        if not path.is_file():
            yield Check(RESULT, skipped="the study is not finished")
            return
        if not (entries := _json_in(path)):
            yield Check(RESULT, problem="unreadable")
            return
        settings, best = self.file.settings, self._best(records)
        derived = StudyResult(self.folder.with_name(self.file.name), records)
        counted = sum(count for state, count in entries["trials"].items() if state not in ("running", "waiting"))
        if not ended and counted < derived.ended:
            since = f"it is of {counted} trials, and the study, which has not ended, has {derived.ended} since"
            yield Check(RESULT, skipped=since)
            return
        running = any(record.state in ("running", "waiting") for record in records)
        compared, left_out = "the numbers of trials", {"storage", "wall_seconds"}
        if absent := [str(record.number) for record in records if record.state == "complete" and not record.metrics]:
            compared += f"; the choice would need the files of trials {', '.join(absent)}"
            left_out |= {"chosen", "best", "pareto_front", "holdout", "cautions"}
        elif entries.get("chosen") is not None and best:
            front = pareto_front(records, settings.objectives) if len(settings.objectives) > 1 else []
            cautions = [] if front or running else cautions_on(self.file.space, best[0], settings.seeds)
            evaluated = holdout if entries.get("holdout") or not running else []
            derived = replace(derived, best_trials=best, front=front, holdout=evaluated, cautions=cautions)
            compared = "best trials, front and hold-out evaluations against all trials"
        yield Check(RESULT, compared, difference(entries, derived.plain("", 0.0), left_out))
        if derived.best is not None and not (self.folder / BEST).is_file():
            yield Check(BEST, problem="missing")
        elif derived.best is not None:
            length = {self.file.subject.steps: best[0].rounds} if settings.budget else {}
            run = self.file.run_with(best[0].params, **length)
            is_best = self._identity_of_file(self.folder / BEST) == self._identity(run)
            yield Check(BEST, "the values of the chosen trial", "" if is_best else "it has other values")

    def _repeated(
        self, records: Sequence[TrialRecord], holdout: Sequence[HoldoutEvaluation], budget: Budget
    ) -> Iterator[Check]:
        """Run trials again within the budget, and say which part of all that is."""
        queue = self._repeatable(records, holdout, budget)
        total = sum(trial.steps for trial in queue)
        if not queue:
            yield Check("trials repeated", skipped="no trial has evaluations here")
            return
        left = count = budget.count(total, sum(trial.seconds for trial in queue))
        shared = self.file.subject.load(self.file.build({})) if count else None
        began_with = self.attributes.get(data_key(shared.source)) if shared is not None else None
        if shared is not None and began_with not in (None, shared.data.digest):
            yield Check("data", f"sha256 against {JOURNAL}", "different data: trials cannot be repeated with these")
            return
        repeated: list[str] = []
        for record in queue:
            if record.steps <= left or (not repeated and left >= int(record.rows[0]["round"]) * len(record.spec.runs)):
                most = left // len(record.spec.runs)
                left -= min(record.steps, left)
                repeated.append(record.name)
                is_whole = record.steps <= most * len(record.spec.runs)
                part = "each evaluation" if is_whole else f"each evaluation up to round {most}"
                yield Check(record.name, f"run again: {part}", self._other_evaluation(record, shared, most))
        unrepeated = [trial.name for trial in queue if trial.name not in repeated]
        compared = f"{count - left} of {total} rounds or iterations ({100 * (count - left) / total:.0f} %)"
        if unrepeated and repeated:
            compared += f"; drawn with --seed {budget.seed}"
        skipped = (
            f"{len(unrepeated)} others, such as {unrepeated[0]}; --rounds {total} repeats all" if unrepeated else ""
        )
        yield Check("trials repeated", compared, skipped=skipped)

    def _repeatable(
        self, records: Sequence[TrialRecord], holdout: Sequence[HoldoutEvaluation], budget: Budget
    ) -> list[_Repeatable]:
        """Return what can be run again: the chosen trial, its hold-out evaluations, and all others in a drawn order."""
        repeatable = [
            _Repeatable(
                f"hold-out evaluation of trial {evaluation.trial.number}, seed {offset}",
                TrialSpec(0, (self.file.build(evaluation.trial.params, offset),), on_test=True),
                [row],
                None,
                ended=True,
            )
            for evaluation in holdout
            for offset, row in zip(evaluation.seeds, evaluation.rows, strict=True)
        ]
        for record in records:
            if record.state in ("complete", "pruned") and (rows := StudyFolder(self.folder).read_rounds(record.number)):
                runs = tuple(self.file.build(record.params, seed) for seed in range(self.file.settings.seeds))
                digests = _json_in(self.folder / of_trial(record.number) / RESULT).get("model_sha256")
                ended = record.state == "complete"
                repeatable.append(_Repeatable(f"trial {record.number}", TrialSpec(0, runs), rows, digests, ended))
        best = self._best(records)
        first = best[0].number if best else None
        budget.draws().shuffle(repeatable)
        order = (f"trial {first}", f"hold-out evaluation of trial {first}, ")
        return sorted(
            repeatable, key=lambda candidate: (candidate.name != order[0], not candidate.name.startswith(order[1]))
        )

    def _other_evaluation(self, trial: _Repeatable, shared: Any, most: int) -> str:
        """Return how a trial that is run again differs from its evaluations, in words."""
        limits = {name: limit for name, limit in self.file.settings.budget_columns.items() if name not in _MEASURED}
        runs = tuple(self.file.subject.untimed(run) for run in trial.spec.runs)
        timed = runs != trial.spec.runs or len(limits) < len(self.file.settings.budget_columns)
        rows, last, on_test = trial.rows, int(trial.rows[-1]["round"]), trial.spec.on_test
        batch = TrialBatch((replace(trial.spec, runs=runs),), limits)
        with closing(self.file.subject.run_trials(batch, shared)) as batches:
            for index, evaluation in enumerate(_evaluations(batches)):
                if evaluation.row is None:
                    return f"run again, it fails: {evaluation.failed}"
                number = int(evaluation.row["round"])
                if number > most:
                    return ""
                if on_test and not (evaluation.is_last or (timed and number == last)):
                    continue  # of a hold-out evaluation, only the last row is kept
                if wrong := _other_row(evaluation, rows[0 if on_test else index]):
                    return f"round {number}: run again, {wrong}"
                if on_test or index == len(rows) - 1:
                    return self._other_end(trial, evaluation, timed=timed)
                if evaluation.is_last:
                    return f"run again, it ends at round {number}"
        return f"run again, it has no evaluation of round {last}"

    def _other_end(self, trial: _Repeatable, evaluation: Evaluation, *, timed: bool) -> str:
        if not trial.ended or timed:
            return ""
        if not evaluation.is_last:
            return f"run again, it does not end at round {trial.rows[-1]['round']}"
        if trial.digests is not None and list(evaluation.model_sha256) != list(trial.digests):
            return "its model_sha256 is not that of the trial when run again"
        return ""


def _evaluations(batches: Generator[list[Evaluation], Any, None]) -> Iterator[Evaluation]:
    """Yield the evaluations of trials that a worker runs, none of which is stopped."""
    message = next(batches, [])
    while message:
        yield from message
        try:
            message = batches.send(())
        except StopIteration:
            return


def _is_less(value: Any, before: Any) -> bool:
    """Return whether both are numbers and the first is less; a file may have anything."""
    return isinstance(value, int | float) and isinstance(before, int | float) and value < before


def _other_row(evaluation: Evaluation, row: Row) -> str:
    repeated = evaluation.row or {}
    return difference(repeated, {name: value for name, value in row.items() if name not in _MEASURED})


def _json_in(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty if it is missing or damaged."""
    try:
        return read_json(path, "")
    except UserError:
        return {}


def _records_of_files(folder: Path) -> list[TrialRecord]:
    """Return the trials as their own files have them, without their times."""
    records = []
    for path in sorted(folder.glob(f"trials/*/{RESULT}")):
        if not (entries := _json_in(path)):
            continue
        names = ("state", "rounds", "feasible", "reason", "retry_of")
        columns = {name: entries[name] for name in names}
        records.append(TrialRecord(entries["trial"], params=entries["values"], metrics=entries["amounts"], **columns))
    return records


def _records_of_table(folder: Path) -> list[TrialRecord]:
    """Return what the table says of each trial but its values and metrics, so that none can be chosen."""
    return [
        TrialRecord(int(row["trial"]), row["state"], {}, rounds=int(row["rounds"]), feasible=False)
        for row in _table_rows(folder).values()
    ]


def _table_rows(folder: Path) -> dict[str, dict[str, str]]:
    path = folder / TABLE
    return _rows_of_text(path.read_text() if path.is_file() else "")


def _rows_of_text(text: str) -> dict[str, dict[str, str]]:
    return {row["trial"]: row for row in csv.DictReader(io.StringIO(text))}


def _table_check(
    folder: Path, records: Sequence[TrialRecord], paths: Sequence[str], *, timed: bool, ended: bool
) -> Check:
    """Compare the table with the trials; that of an interrupted study may be older than its last trials."""
    if not (folder / TABLE).is_file():
        chosen = _json_in(folder / RESULT).get("chosen") is not None
        return Check(TABLE, problem="missing") if chosen else Check(TABLE, skipped="the study is not finished")
    expected, rows = _rows_of_text(table_text(records, paths)), _table_rows(folder)
    compared = f"each value against {JOURNAL if timed else 'the files of the trials'}"
    if not ended:
        compared += f", of the {len(rows)} trials in it; the study has not ended"
        rows = {number: row for number, row in rows.items() if row["state"] not in ("running", "waiting")}
        expected = {number: row for number, row in expected.items() if number in rows}
    for number in sorted(expected.keys() | rows.keys() if timed else expected, key=int):
        if number not in rows:
            return Check(TABLE, compared, f"trial {number} is not in it")
        entries, wanted = rows[number], expected.get(number, {})
        names = [name for name in {**wanted, **entries} if timed or (name in wanted and name != "wall_seconds")]
        if wrong := difference(entries, {name: wanted.get(name) for name in names}):
            return Check(TABLE, compared, f"trial {number}: {wrong}")
    return Check(TABLE, compared)
