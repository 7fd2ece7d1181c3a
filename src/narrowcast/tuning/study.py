"""A study from its checks to its result: trials, their selection, and the hold-out evaluation of the best."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast._version import __version__
from narrowcast.cluster.ray_backend import RayBackend
from narrowcast.cluster.worker_pool import LocalPool, WorkerPool, dispatch
from narrowcast.platform.config import flatten
from narrowcast.platform.disk import GO_ON, make_folders, writing
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.kinds import optional
from narrowcast.platform.redaction import hide_secrets
from narrowcast.platform.tracking.mlflow_run import check_store, open_run
from narrowcast.platform.tracking.store_address import StoreAddress
from narrowcast.platform.tracking.study_run import StudyStore
from narrowcast.platform.tracking.units import counted
from narrowcast.runs.outputs import git_commit
from narrowcast.runs.run_folder import make_writable
from narrowcast.tuning.holdout import HoldoutEvaluation, HoldoutQueue
from narrowcast.tuning.selection import best_trials, pareto_front
from narrowcast.tuning.storage import open_storage
from narrowcast.tuning.study_client import StudyClient
from narrowcast.tuning.study_file import StudyFile
from narrowcast.tuning.study_folder import JOURNAL, StudyFolder
from narrowcast.tuning.study_plots import draw_study
from narrowcast.tuning.study_result import StudyResult, cautions_on, why_no_trial_is_complete
from narrowcast.tuning.study_trials import Observer, StudyTrials

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
    path: Path | None = optional(file.subject.source(file.build(params)), "path")
    return path


def run_study(prepared: PreparedStudy, observe: Observer = lambda _: None) -> StudyResult:
    """Run trials until there are enough, then evaluate the best on test.

    Raise `RunFailed` if no trial is usable, or if files cannot be written.
    """
    with writing(prepared.folder.path, GO_ON):
        return _run_study(prepared, observe)


def _run_study(prepared: PreparedStudy, observe: Observer) -> StudyResult:
    began = time.monotonic()
    file, folder = prepared.file, prepared.folder
    store = StudyStore(prepared.store, _mlflow_run(prepared))
    trials = StudyTrials(file, prepared.client, folder, store, observe)
    trials.resend(store.open())
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
    return values | {"space": {path: each.model_dump_json() for path, each in file.space.dimensions.items()}}


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
