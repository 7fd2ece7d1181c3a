"""A study from its checks to its result: trials, their selection, and the hold-out evaluation of the best.

The trials are a job queue: asked of Optuna, told to it, written to files and to MLflow.
"""

from __future__ import annotations

import hashlib
import math
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast._version import __version__
from narrowcast.cluster.backend import RayBackend
from narrowcast.cluster.worker_pool import JobQueue, LocalPool, WorkerPool, dispatch
from narrowcast.platform.config.files import flatten
from narrowcast.platform.config.redaction import hide_secrets
from narrowcast.platform.config.run_fields import StoreAddress
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.storage.disk import GO_ON, make_folders, writing
from narrowcast.platform.storage.journal import working_on_study
from narrowcast.platform.tracking.sender import check_store, open_run
from narrowcast.platform.tracking.study_sender import StudyStore, TrialRun
from narrowcast.platform.tracking.units import counted
from narrowcast.runs.folder import make_writable
from narrowcast.runs.outputs import git_commit
from narrowcast.tuning.client import ProposedTrial, StudyClient
from narrowcast.tuning.result import (
    JOURNAL,
    HoldoutEvaluation,
    HoldoutQueue,
    StudyFolder,
    StudyResult,
    best_trials,
    cautions_on,
    pareto_front,
    why_no_trial_is_complete,
)
from narrowcast.tuning.settings import trial_metrics
from narrowcast.tuning.storage import open_storage
from narrowcast.tuning.study_file import StudyFile
from narrowcast.tuning.study_plots import draw_study
from narrowcast.tuning.trials import Evaluation, TrialBatch, TrialRecord, TrialSpec, trial_records

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
        return trial_records(self._client.trials(), self._file.space)

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
        return [evaluation.key for evaluation in message if self._ends_with(evaluation)]

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
        trials = self._client.trials()
        for record in trial_records(trials, self._file.space):
            if record.state in ("waiting", "running") or sent.get(str(record.number)) == record.state:
                continue
            if not self._client.is_owned_elsewhere(trials[record.number]):
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


_JOIN_SECONDS = 10.0


@dataclass(frozen=True)
class PreparedStudy:
    """A study that has passed every check; the storage holds it and its folder exists."""

    file: StudyFile
    client: StudyClient
    shared: Any
    folder: StudyFolder
    store: StoreAddress
    storage: str


def check_study(file: StudyFile) -> Any:
    """Check the study's values on the run, its metrics and its cluster; return what workers share, read for that."""
    base = file.build({})
    shared = file.subject.load(base)
    file.check(shared)
    backend = _ray_backend(file) if file.settings.backend == "ray" else None
    file.subject.check_place(base, shared, backend, file.settings.trials_together)
    return shared


def prepare_study(file: StudyFile, output: Path) -> PreparedStudy:
    """Check everything, and create the study or join it; raise `UserError` before anything is written."""
    shared = check_study(file)
    make_writable(output)
    folder = StudyFolder(output / file.name)
    if (folder.path / "config.yaml").is_file():
        raise UserError(f"{folder.path} is a run's folder; give the study another name")
    store = file.build({}).tracking.resolve(output)
    check_store(store)
    storage = file.settings.storage or str(folder.path / JOURNAL)
    opened = open_storage(storage, file.settings.storage_timeout_seconds)
    client = StudyClient(file.name, opened, file.settings, file.space, file.digest())
    client.check_data(shared.source, shared.data.digest)
    _check_files_of_trials(file, client)
    with writing(folder.path, GO_ON):
        make_folders(folder.path)
        folder.write_yaml("study.yaml", file.plain())
    return PreparedStudy(file, client, shared, folder, store, storage)


def _check_files_of_trials(file: StudyFile, client: StudyClient) -> None:
    """Raise `UserError` if a file that the space names has changed since a trial of the study read it."""
    checked = {None, _path_of(file, {})}
    for trial in client.trials():
        if (path := _path_of(file, trial.params)) not in checked:
            checked.add(path)
            loaded = file.subject.load(file.build(trial.params))
            client.check_data(loaded.source, loaded.data.digest)


def _path_of(file: StudyFile, params: Mapping[str, Any]) -> Path | None:
    path: Path | None = file.subject.source(file.build(params)).location
    return path


def run_study(prepared: PreparedStudy, observe: Observer = lambda _: None) -> StudyResult:
    """Run trials until there are enough, then evaluate the best on test.

    Raise `RunFailed` if no trial is usable, or if files cannot be written.
    """
    with writing(prepared.folder.path, GO_ON), working_on_study(prepared.folder.path):
        return _run_study(prepared, observe)


def _run_study(prepared: PreparedStudy, observe: Observer) -> StudyResult:
    began = time.monotonic()
    file, folder = prepared.file, prepared.folder
    store = StudyStore(prepared.store, _mlflow_run(prepared))
    trials = StudyTrials(file, prepared.client, folder, store, observe)
    trials.resend(store.open(folder.path))
    status, result = "FAILED", StudyResult(folder.path, (), shares=file.shares)
    with ExitStack() as alone:
        try:
            with _worker_pool(file, prepared.shared) as pool:
                dispatch(trials, pool, file.settings.workers)
                alone.enter_context(folder.closing(observe))
                result = _conclude(prepared, trials, store, pool, observe)
            status = "RUNNING" if result.elsewhere else "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            prepared.client.release()
            raise
        finally:
            trials.resend(store.states())
            sent = store.close(file.build({}).tracking.flush_seconds)
            if status not in ("RUNNING", "FINISHED"):
                result = StudyResult(folder.path, trials.records(), shares=file.shares)
            seconds, objectives = time.monotonic() - began, file.settings.objectives
            folder.write_json("result.json", result.plain(hide_secrets(prepared.storage), seconds))
            tags = {"state": status.lower()}
            metrics = {} if status == "RUNNING" else result.metrics(list(objectives), seconds)  # the last one's count
            note, files = result.note(objectives), folder.artifacts()
            if not (store.finish(status, metrics, result.ended, tags, note, files) and sent):
                observe("not all of this study is in MLflow yet; the same command sends the rest")
    return result


def _ray_backend(file: StudyFile) -> RayBackend:
    settings = file.settings
    return RayBackend(
        actors=settings.parallel,
        cpus_per_actor=settings.cpus_per_worker,
        gpus_per_actor=settings.gpus_per_worker,
        address=settings.address,
    )


def _worker_pool(file: StudyFile, shared: Any) -> AbstractContextManager[WorkerPool]:
    if file.settings.backend == "local":
        return nullcontext(LocalPool(file.subject.run_trials, shared))
    return _ray_backend(file).worker_pool(file.subject.run_trials, shared)


def _mlflow_run(prepared: PreparedStudy) -> str:
    """Return the id of the study's run in this store; the process that created the study opens it, others wait."""
    file, study, client = prepared.file, prepared.client.study, prepared.client
    uri = prepared.store.uri
    where = uri if "://" in uri and not uri.startswith("sqlite") else socket.gethostname()
    key = "mlflow:" + hashlib.sha256(f"{where} {prepared.store.shown}".encode()).hexdigest()[:16]
    deadline = time.monotonic() + (0 if client.created else _JOIN_SECONDS)
    while key not in study.user_attrs and time.monotonic() < deadline and not client.trials():
        time.sleep(0.2)
    if key not in study.user_attrs:
        base = file.build({})
        params = flatten(base.plain()) | {f"study.{name}": value for name, value in flatten(_params(file)).items()}
        tags = {"kind": "study", "git_commit": git_commit() or "unknown", "narrowcast_version": __version__}
        data = prepared.shared.data
        cursor = open_run(prepared.folder.path, base.tracking, params, tags, data, prepared.store)
        study.set_user_attr(key, cursor.run_id)
    return str(study.user_attrs[key])


def _params(file: StudyFile) -> dict[str, Any]:
    values: dict[str, Any] = file.settings.model_dump(mode="json", exclude={"storage", "address"})
    return values | {"space": {path: dimension.model_dump_json() for path, dimension in file.space.dimensions.items()}}


def _conclude(
    prepared: PreparedStudy, trials: StudyTrials, store: StudyStore, pool: WorkerPool, observe: Observer
) -> StudyResult:
    """Write the table, the plots and the chosen experiment, and evaluate the best trials on test."""
    file, folder, settings = prepared.file, prepared.folder, prepared.file.settings
    records = trials.records()
    table = folder.write_table(records, file.space.dimensions)
    elsewhere, _ = prepared.client.elsewhere()
    complete = [trial for trial in records if trial.state == "complete"]
    if not complete and not elsewhere:
        raise RunFailed(why_no_trial_is_complete(file.name, records))
    best = best_trials(records, settings)
    if not best and not elsewhere:
        raise RunFailed(
            f"none of the {len(complete)} complete trials keeps the constraints; loosen study.constraints, or look "
            f"at {table}"
        )
    front = pareto_front(records, settings.objectives) if len(settings.objectives) > 1 else []
    if elsewhere:
        return StudyResult(folder.path, records, best, front, (), elsewhere, [table], file.shares)
    chosen, plots = best[0], folder.path / "plots"
    config = trials.config(chosen.params, chosen.rounds if settings.budget else None)
    files = [folder.write_yaml("best.yaml", config), table, plots]
    draw_study(prepared.client.study, records, file, chosen, plots)
    holdout: list[HoldoutEvaluation] = []
    if settings.holdout.trials:
        of = "the best trial" if len(best) == 1 else f"the best {len(best)} trials, each"
        observe(f"hold-out evaluation of {of} with {counted(settings.holdout.seeds, 'new seed')}")
        queue = HoldoutQueue(file, best, folder, prepared.client)
        dispatch(queue, pool, settings.workers)
        holdout, sent = queue.results(), store.states()
        for run in queue.tracked_runs(holdout):
            if sent.get(run.key) != run.state:
                store.put(run)
    cautions = [] if len(settings.objectives) > 1 else cautions_on(file.space, chosen, settings.seeds)
    return StudyResult(folder.path, records, best, front, holdout, 0, files, file.shares, cautions)
