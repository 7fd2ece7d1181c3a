"""The trials of a study as a job queue: asked of Optuna, told to it, written to files and to MLflow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from narrowcast.cluster.worker_pool import JobQueue
from narrowcast.platform.tracking.study_run import StudyStore, TrialRun
from narrowcast.tuning.study_client import ProposedTrial, StudyClient
from narrowcast.tuning.study_file import StudyFile
from narrowcast.tuning.study_folder import StudyFolder
from narrowcast.tuning.study_settings import trial_metrics
from narrowcast.tuning.trial_messages import Evaluation, TrialBatch, TrialSpec
from narrowcast.tuning.trial_record import TrialRecord

_TAKE_OVER_SECONDS = 5.0

Observer = Callable[[TrialRecord | str], None]
"""Is called with the record of a trial whenever it starts, is evaluated or ends, and with lines of text."""


class StudyTrials(JobQueue[TrialBatch]):
    """The trials that this process runs, as the queue that `dispatch` takes batches from until there are enough."""

    def __init__(
        self, file: StudyFile, client: StudyClient, folder: StudyFolder, store: StudyStore, observe: Observer
    ) -> None:
        self._file, self._client, self._folder, self._store, self._observe = file, client, folder, store, observe
        self._steps = file.subject.steps
        self._running: dict[int, tuple[ProposedTrial, list[dict[str, Any]]]] = {}
        self._take_over_at = 0.0
        self._ends_at = time.monotonic() + (file.settings.timeout_seconds or math.inf)

    def records(self) -> list[TrialRecord]:
        """Return all trials of the study."""
        return [TrialRecord.of(trial, self._file.space) for trial in self._client.trials()]

    def next_job(self) -> TrialBatch | None:
        """Ask for trials and start them; None after the study's timeout or if there are enough."""
        specs: list[TrialSpec] = []
        while len(specs) < self._file.settings.trials_together and self._in_time():
            if (trial := self._client.ask()) is None:
                break
            self._running[trial.number] = trial, []
            seeds = range(self._file.settings.seeds)
            specs.append(TrialSpec(trial.number, tuple(self._file.build(trial.params, seed) for seed in seeds)))
            self._note(TrialRecord(trial.number, "running", trial.params, retry_of=trial.retry_of))
        return TrialBatch(tuple(specs), self._file.settings.budget_columns) if specs else None

    def answer_to(self, message: Sequence[Evaluation]) -> list[int]:
        """Report the evaluations of a batch; return the numbers of the trials that end here."""
        return [each.key for each in message if self._ends_with(each)]

    def _ends_with(self, evaluation: Evaluation) -> bool:
        """Report an evaluation, and end its trial if it is the last, or failed or pruned."""
        number, row = evaluation.key, evaluation.row
        if row is None:
            self._end(evaluation)
            return True
        for source, sha256 in evaluation.data:
            self._client.check_data(source, sha256)
        trial, rows = self._running[number]
        rows.append({**row, "logged_at_ms": int(time.time() * 1000)})
        self._observe(TrialRecord(number, "running", trial.params, trial_metrics(row), int(row["round"])))
        stopped = self._client.report(number, row)
        if stopped or evaluation.is_last:
            self._end(evaluation)
            return True
        return False

    def worker_died(self, job: TrialBatch, reason: str) -> None:
        """End the unfinished trials of a worker's batch; each is queued again the first time."""
        for number in (spec.key for spec in job.trials if spec.key in self._running):
            self._client.worker_died(number, reason)
            _, rows = self._running.pop(number)
            self._note(self._record(number), rows)

    def heartbeat(self) -> None:
        """Record that this process is alive, and take over the trials of processes that are not."""
        self._client.heartbeat()
        if time.monotonic() > self._take_over_at:
            self.take_over_lost()

    def is_finished(self) -> bool:
        """Return whether there are enough trials, and each that runs belongs to a process that was seen alive."""
        if self.take_over_lost() and self._in_time():
            return False
        return not self._client.elsewhere()[1]

    def take_over_lost(self) -> bool:
        """End and queue again the trials of dead processes; return whether there were any."""
        self._take_over_at = time.monotonic() + _TAKE_OVER_SECONDS
        numbers = self._client.take_over_lost()
        for number in numbers:
            self._note(self._record(number))
        return bool(numbers)

    def resend(self, sent: Mapping[str, str]) -> None:
        """Send the trials whose state in MLflow, `sent`, differs from Optuna's, unless a live process owns them."""
        for trial, record in zip(self._client.trials(), self.records(), strict=False):
            if record.state in ("waiting", "running") or sent.get(str(record.number)) == record.state:
                continue
            if not self._client.is_owned_elsewhere(trial):
                self._track(record, self._folder.read_rounds(record.number))

    def config(self, params: Mapping[str, Any], rounds: int | None = None) -> dict[str, Any]:
        """Return the config that repeats a trial with `narrowcast run`, up to so many rounds or iterations."""
        plain: dict[str, Any] = self._file.run_with(params, **({self._steps: rounds} if rounds else {})).plain()
        return plain

    def _in_time(self) -> bool:
        return time.monotonic() < self._ends_at

    def _record(self, number: int) -> TrialRecord:
        return TrialRecord.of(self._client.trials()[number], self._file.space)

    def _end(self, last: Evaluation) -> None:
        trial, rows = self._running.pop(last.key)
        state = self._client.tell(trial.number, last.row, pruned=not last.is_last, reason=last.failed)
        if state == "lost":  # another process has taken the trial over and reports its end
            return
        record = self._record(trial.number)
        config = self.config(trial.params, int(rows[-1]["round"]) if last.is_last else None)
        self._folder.write_trial(record, config, rows, last.model_sha256)
        self._note(record, rows)

    def _note(self, record: TrialRecord, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._track(record, rows)
        self._observe(record)

    def _track(self, record: TrialRecord, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """Send a trial to MLflow."""
        tags = {"feasible": str(record.feasible).lower()}
        if record.reason:
            tags["reason"] = record.reason
        if record.retry_of is not None:
            tags["retry_of"] = str(record.retry_of)
        if record.state == "pruned":
            tags[f"pruned_at_{self._steps.removesuffix('s')}"] = str(record.rounds)
        rows = tuple(rows)
        if record.metrics and rows:
            final = {**record.metrics, f"{self._steps}_run": record.rounds}
            last = {name: value for name, value in final.items() if name not in rows[-1]}
            rows = (*rows, {**last, "round": record.rounds, "logged_at_ms": rows[-1]["logged_at_ms"]})
        name = f"{record.number:03d}-{self._file.name}"  # the number first, since MLflow's table cuts long names
        self._store.put(TrialRun(str(record.number), name, record.state, record.params, tags, rows))
