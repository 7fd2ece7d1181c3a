"""An MLflow store: its SQLite file, the parts of MLflow outside its documented interface, and the calls to the store.

`sender` makes the calls, in a second process if there is one, so that arguments and results are plain values. A call
that the store does not answer, or refuses, raises `StoreError`.

The undocumented parts are credentials, places of files, system metrics, tables and schemes. `CHECKED_VERSION` is the
latest version of MLflow that they were checked against; a test fails where a later one is installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from functools import partial, wraps
from importlib.metadata import version
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import urlsplit

import psutil
import requests
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracking._tracking_service import client as tracking_client
from mlflow.utils import credentials as mlflow_credentials
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID
from mlflow.utils.rest_utils import MlflowHostCreds
from packaging.version import Version
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.exc import SQLAlchemyError

from narrowcast.platform.config.redaction import check_address, has_hidden, hide_secrets, redact
from narrowcast.platform.config.run_fields import PLACE, StoreAddress
from narrowcast.platform.config.trust import ScopedSettings
from narrowcast.platform.errors import StoreError, StoreRefused, UserError
from narrowcast.platform.storage.disk import Disk, disk, make_folders, replace_by, use_disk, write_atomically
from narrowcast.platform.storage.journal import step_of
from narrowcast.platform.tracking.cursor import is_abandoned, place_of

_DIGEST_BYTES = 32


def make_sqlite_file(uri: str) -> None:
    """Create the file that a URI names with all its tables, unless it is there.

    MLflow creates its tables in many steps, and cannot open a file in which a killed process has left some of them.
    These steps take seconds, so an empty store is kept in the user's cache for each version of MLflow, and copied.
    Raise `OSError` or a `SQLAlchemyError`.
    """
    path = Path(make_url(uri).database or "")
    make_folders(path.parent)
    if _is_made(path):
        return
    with _locked(path.parent):
        if _is_made(path):  # by another process, just now
            return
        part = path.with_name(path.name + ".part")
        for leftover in (part, part.with_name(part.name + "-journal")):
            with suppress(FileNotFoundError):
                disk().remove(leftover)
        kept = _kept()
        if kept:
            disk().create(part, kept)
        else:
            disk().write_with(part, _with_tables)
        replace_by(part, path)
        if not kept:
            _keep(path.read_bytes())


def _is_made(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _cache() -> Path:
    """Return the file that keeps an empty store of this version of MLflow, and the digest of it."""
    # expanduser, unlike Path.home, does not raise for a user without a home folder
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(root, "narrowcast", f"mlflow-{version('mlflow-skinny')}.empty")


def _kept() -> bytes | None:
    """Return the empty store of the cache; None if there is none, or a damaged one."""
    try:
        content = _cache().read_bytes()
    except OSError:
        return None
    digest, store = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return store if store and hashlib.sha256(store).digest() == digest else None


def _keep(store: bytes) -> None:
    path = _cache()
    # Not a file of the run, so on this machine's disk whatever disk the run has.
    with suppress(OSError), use_disk(Disk()):
        make_folders(path.parent)
        with _locked(path.parent):
            write_atomically(path, hashlib.sha256(store).digest() + store)


def _with_tables(path: Path) -> None:

    engine = create_engine(f"sqlite:///{path}")
    try:
        create_tables(engine)
    finally:
        engine.dispose()


CHECKED_VERSION = "3.17.2"
logger = logging.getLogger(__name__)
_WITHHELD = ("username", "password", "token", "aws_sigv4", "auth", "client_cert_path")
_called: ContextVar[StoreAddress | None] = ContextVar("called", default=None)


@contextmanager
def limits_of(store: StoreAddress) -> Iterator[None]:
    """Let MLflow send credentials and files, in the block, only where the store's address allows it."""
    token = _called.set(store)
    try:
        yield
    finally:
        _called.reset(token)


def _host_credentials(host: str, **given: Any) -> MlflowHostCreds:
    """Return what MLflow connects to a host with; it asks for that before every request, artifacts included."""
    store = _called.get()
    if store is not None and not store.gets_credentials(host):
        given = {key: text for key, text in given.items() if key not in _WITHHELD}
    return MlflowHostCreds(host, **given)


def _place_of_files(artifact_uri: str, tracking_uri: str | None = None) -> ArtifactRepository:
    """Return where MLflow puts the files of a run; raise `UserError` if its store may not name that place."""
    store = _called.get()
    if store is not None and not store.may_keep_files_at(artifact_uri):
        raise UserError(
            f"the store at {store.shown} would keep the files of the run at {hide_secrets(artifact_uri)}; if you trust "
            f"it, give --tracking-uri {store.shown}"
        )
    return get_artifact_repository(artifact_uri, tracking_uri)


# `setattr`, since for types these names are fixed.
setattr(mlflow_credentials, "MlflowHostCreds", _host_credentials)  # noqa: B010
setattr(tracking_client, "get_artifact_repository", _place_of_files)  # noqa: B010


def import_sql_store() -> None:
    """Import the store of databases, which MLflow does when it first opens one."""
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401


def create_tables(engine: Engine) -> None:
    """Create the tables of a tracking store in an empty database."""
    from mlflow.store.db.utils import _initialize_tables  # takes a while, and a store that is there has them

    _initialize_tables(engine)


def has_store(scheme: str) -> bool:
    """Return whether MLflow, or a plugin of it, has tracking stores of this scheme."""
    from mlflow.tracking._tracking_service import utils  # imports every store

    return scheme in utils._tracking_store_registry._registry


class SystemMonitor:
    """A thread that logs the load of this machine to an MLflow run until `finish`, through outages of the store.

    A resumed run continues at the step after its last sample. The documented monitor,
    `mlflow.enable_system_metrics_logging`, works on the one active run of a process, and ends for good at the first
    call that the store does not answer.
    """

    def __init__(
        self, uri: str, run_id: str, settings: Callable[[], AbstractContextManager[None]], *, resume: bool
    ) -> None:
        """Begin to sample; each call to the store is made within `settings`."""
        self._settings = settings
        self._monitor: Any = SystemMetricsMonitor(run_id, resume_logging=resume, tracking_uri=uri)
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="system-monitor", daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while True:
            for _ in range(self._monitor.samples_before_logging):
                self._monitor.collect_metrics()
                if self._finished.wait(self._monitor.sampling_interval):
                    return
            try:
                with self._settings():
                    self._monitor.publish_metrics(self._monitor.aggregate_metrics())
            except Exception as error:  # MLflow keeps the samples and sends them with the next
                logger.debug("the load of this machine was not logged: %s", type(error).__name__)

    def finish(self) -> None:
        """Stop sampling, and send what is left if the store answers."""
        self._finished.set()
        self._thread.join()
        try:
            with self._settings():
                self._monitor.mlflow_logger.flush()
        except Exception as error:  # never fail a run over system metrics
            logger.debug("the load of this machine was not logged: %s", type(error).__name__)


def _without_home() -> dict[str, str]:
    """Return a home folder for a user without one, whom MLflow and Matplotlib ask for it when they are imported."""
    try:
        Path.home()
    except RuntimeError:
        return {"HOME": gettempdir()}
    return {}


MLFLOW_SETTINGS = ScopedSettings(
    {
        **_without_home(),
        # Time limits for calls to a store that is down, and no telemetry.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "5",
        # MLflow would print the address of each finished run, with the password in it.
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    },
    # One warning of ours reports an outage; MLflow's would be many, some with the password.
    dict.fromkeys(("alembic", "mlflow", "urllib3.connectionpool"), logging.CRITICAL),
)
# MLflow's own threads would be out of the limits of a store, and a position would be saved before its rounds arrive.
_SYNCHRONOUS = ScopedSettings({"MLFLOW_ENABLE_ASYNC_LOGGING": "false"}, forced=True)
with MLFLOW_SETTINGS.in_force():
    from mlflow import MlflowClient
    from mlflow.entities import Dataset, DatasetInput, InputTag, LifecycleStage, Metric, Param, RunTag
    from mlflow.exceptions import MlflowException
    from mlflow.utils.mlflow_tags import (
        MLFLOW_DATASET_CONTEXT,
        MLFLOW_RUN_NAME,
        MLFLOW_SOURCE_NAME,
        MLFLOW_SOURCE_TYPE,
        MLFLOW_USER,
    )

    from narrowcast.platform.tracking.view import PAGE, set_up_view

STORE_ERRORS = (MlflowException, SQLAlchemyError, requests.RequestException, OSError)
_PROBE_SECONDS = 5.0
_PARAMS_AT_ONCE = 100
_DATABASES = ("postgresql", "mysql", "sqlite", "mssql")  # the databases that MLflow documents
_monitors: dict[str, SystemMonitor] = {}
"""By run; they live in the process that makes the calls."""
P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def calls_to(store: StoreAddress) -> Iterator[None]:
    """Call MLflow in the block, within the limits of the store's address."""
    with MLFLOW_SETTINGS.in_force(), _SYNCHRONOUS.in_force(), limits_of(store):
        yield


def _calling(function: Callable[Concatenate[StoreAddress, P], R]) -> Callable[Concatenate[StoreAddress, P], R]:
    """Return the function with its calls within `calls_to` the store, its first argument."""

    @wraps(function)
    def calling(store: StoreAddress, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with calls_to(store):
            return function(store, *args, **kwargs)

    return calling


@_calling
def check_store(store: StoreAddress) -> None:
    """Raise `UserError` within seconds if no tracking store answers at the address."""
    uri, shown = store.uri, store.shown
    if has_hidden(uri):
        raise UserError(f"the password of the MLflow store {uri} is not stored; give the full address as tracking.uri=")
    check_address(uri, "tracking.uri")
    if uri in ("sqlite://", "sqlite:///", "sqlite:///:memory:"):
        raise UserError(f'tracking.uri = "{uri}" names no file; write sqlite:///path/to/mlflow.db')
    if "://" in uri and not has_store(scheme := re.split(r"[+:]", uri)[0]):
        raise UserError(
            f"no MLflow store answers at {shown} (none has the scheme {scheme}); set tracking.uri or "
            "MLFLOW_TRACKING_URI to http://HOST:PORT, sqlite:///path/to/mlflow.db or postgresql://HOST/DATABASE"
        )
    try:
        if urlsplit(uri).scheme in ("http", "https"):
            answer = requests.get(f"{uri.rstrip('/')}/version", timeout=_PROBE_SECONDS)
            answer.raise_for_status()
            Version(answer.text)  # other servers do not answer with a version
        elif re.split(r"[+:]", uri)[0] in _DATABASES:
            if uri.startswith("sqlite:///"):
                make_sqlite_file(uri)
            engine = create_engine(uri)
            engine.connect().close()  # if this fails, MLflow would retry for two minutes
            engine.dispose()
        MlflowClient(uri).search_experiments(max_results=1)
    except (*STORE_ERRORS, ValueError, ImportError) as error:  # a malformed URI, a database without its driver
        raise StoreRefused(
            f"no MLflow store answers at {shown} ({short_reason(error)}); start it, or set tracking.uri or "
            "MLFLOW_TRACKING_URI to a store that answers"
        ) from error


@_calling
def pages_of_runs(store: StoreAddress) -> dict[str, str]:
    """Return the page of the MLflow UI for each experiment with runs, by its name; raise as `check_store` does."""
    check_store(store)
    client = MlflowClient(store.uri)
    return {
        experiment.name: PAGE.format(experiment_id=experiment.experiment_id)
        for experiment in client.search_experiments()
        if client.search_runs([experiment.experiment_id], max_results=1)
    }


def short_reason(error: BaseException) -> str:
    """Return a store's error in one line, without a password."""
    while isinstance(error, requests.ConnectionError) and error.args and isinstance(error.args[0], Exception):
        error = getattr(error.args[0], "reason", None) or error.args[0]
    lines = [line for line in str(error).splitlines() if not line.startswith("(raised as a result of")]
    text = redact(lines[0] if lines else "")
    return f"{type(error).__name__}: {text[:160]}".rstrip(": ")


@contextmanager
def answering() -> Iterator[None]:
    """Raise `StoreError` where a call in the block fails."""
    try:
        yield
    except STORE_ERRORS as error:
        raise StoreError(short_reason(error)) from error


@_calling
def end_abandoned(store: StoreAddress, output: Path) -> None:
    """End the runs of folders in `output` that killed processes have left running; raise as `check_store` does."""
    check_store(store)
    client = MlflowClient(store.uri)
    for experiment in client.search_experiments():
        _end_abandoned(client, experiment.experiment_id, output.resolve())


def _end_abandoned(client: MlflowClient, experiment_id: str, output: Path, of: Path | None = None) -> None:
    """End as killed the running runs of the folder `of`, those in `output` that are abandoned, and the trials of both.

    A trial of a study has no folder of its own in the store: its run ends with that of the study.
    """
    ended, running = set[str](), client.search_runs([experiment_id], "attributes.status = 'RUNNING'")
    for run in running:
        tags, folder = run.data.tags, output / str(run.info.run_name)
        is_mine = of is not None and tags.get(PLACE) == place_of(of)
        of_study = tags.get("kind") == "study"
        if is_mine or (
            tags.get(PLACE) == place_of(folder) and is_abandoned(folder, run.info.run_id, of_study=of_study)
        ):
            ended.add(run.info.run_id)
    for run in running:
        if not ended.isdisjoint((run.info.run_id, run.data.tags.get(MLFLOW_PARENT_RUN_ID))):
            client.set_terminated(run.info.run_id, "KILLED")


@_calling
def open_run(
    store: StoreAddress,
    experiment: str,
    artifacts: str | None,
    folder: Path,
    params: Mapping[str, str],
    tags: Mapping[str, str],
    data: Mapping[str, str],
) -> str:
    """Create a run with its params, tags and data set, `data` being the fields of `Dataset`; return the run's id.

    `artifacts` is the place of the artifacts of an experiment that is new; `data` may be empty. Running runs of this
    folder, and those beside it that are abandoned, are ended as killed.
    """
    client, run_id, name = MlflowClient(store.uri), "", folder.name
    try:
        experiment_id = _experiment_id(client, experiment, artifacts)
        _end_abandoned(client, experiment_id, folder.parent, of=folder)
        about = {**tags, PLACE: place_of(folder), **origin_tags(name)}
        run = client.create_run(experiment_id, run_name=name, tags=about)
        run_id = str(run.info.run_id)
        entries = as_params(params)
        for start in range(0, len(entries), _PARAMS_AT_ONCE):
            client.log_batch(run_id, params=entries[start : start + _PARAMS_AT_ONCE])
        inputs = [DatasetInput(Dataset(**data), [InputTag(MLFLOW_DATASET_CONTEXT, "training")])] if data else []
        try:
            client.log_inputs(run_id, inputs)
        except MlflowException:  # another run has just created the entry of the data set
            client.log_inputs(run_id, inputs)
    except STORE_ERRORS as error:
        if run_id:
            with suppress(*STORE_ERRORS):
                client.set_terminated(run_id, "FAILED")
        raise StoreRefused(
            f"the MLflow store at {store.shown} refused the run ({short_reason(error)}); check it"
        ) from error
    return run_id


def origin_tags(name: str) -> dict[str, str]:
    """Return the tags for the name, user and source of a run."""
    return {
        MLFLOW_RUN_NAME: name,
        MLFLOW_USER: psutil.Process().username(),
        MLFLOW_SOURCE_NAME: "narrowcast",
        MLFLOW_SOURCE_TYPE: "LOCAL",
    }


def as_params(values: Mapping[str, Any]) -> list[Param]:
    """Return values as MLflow params, under names that MLflow accepts."""
    return [Param(metric_name(name), redact(str(value))) for name, value in values.items()]


def _experiment_id(client: MlflowClient, name: str, artifacts: str | None) -> str:
    """Return the id of an MLflow experiment, which is created if it is missing."""
    known = client.get_experiment_by_name(name)
    if known is not None:
        return str(known.experiment_id)
    try:
        created = str(client.create_experiment(name, artifact_location=artifacts))
    except MlflowException:  # another process has just created it
        if (known := client.get_experiment_by_name(name)) is None:
            raise
        return str(known.experiment_id)
    set_up_view(client, created)
    return created


@_calling
def send_rounds(store: StoreAddress, run_id: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Send the metrics of rounds or iterations, which are not too many for one batch."""
    metrics = [
        Metric(metric_name(name), float(value), row["logged_at_ms"], step_of(row))
        for row in rows
        for name, value in sorted(row.items(), key=_by_interest)
        if name not in ("round", "iteration", "logged_at_ms") and value is not None
    ]
    with answering():
        MlflowClient(store.uri).log_batch(run_id, metrics=metrics)


def _by_interest(entry: tuple[str, Any]) -> int:
    """Order the metrics of a round: pages of MLflow that compare runs begin with the metric that came first."""
    name, _ = entry
    return 0 if name.startswith("test.") else 1 if name.startswith("validation.") else 2 if name == "loss" else 3


def metric_name(name: str) -> str:
    """Return the name with @, which MLflow refuses, spelled out: hr@10 becomes hr_at_10."""
    return name.replace("@", "_at_")


@_calling
def start_monitor(store: StoreAddress, run_id: str, resume: bool) -> None:
    """Begin to log the load of this machine to a run."""
    _monitors[run_id] = SystemMonitor(store.uri, run_id, partial(calls_to, store), resume=resume)


def finish_monitor(run_id: str) -> None:
    """Stop what `start_monitor` began, unless it has ended with its process."""
    if monitor := _monitors.pop(run_id, None):
        monitor.finish()


@_calling
def has_run(store: StoreAddress, run_id: str) -> bool:
    """Return whether the store has this run, and nobody has deleted it; raise `StoreError` if it does not answer."""
    try:
        return str(MlflowClient(store.uri).get_run(run_id).info.lifecycle_stage) == LifecycleStage.ACTIVE
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):  # the latter: no id of a run
            return False
        raise StoreError(short_reason(error)) from error
    except STORE_ERRORS as error:
        raise StoreError(short_reason(error)) from error


@_calling
def reopen_run(store: StoreAddress, run_id: str) -> None:
    """Mark a run as running again; raise `UserError` if the store refuses."""
    try:
        MlflowClient(store.uri).update_run(run_id, status="RUNNING")
    except STORE_ERRORS as error:
        raise StoreRefused(
            f"the store at {store.shown} cannot continue MLflow run {run_id} ({short_reason(error)})"
        ) from error


@_calling
def close_run(
    store: StoreAddress,
    run_id: str,
    files: Iterable[tuple[str, str | None]],
    tags: Mapping[str, str],
    metrics: Mapping[str, float],
    stamp_ms: int,
    status: str,
) -> None:
    """Log files, each with its folder below that of the run, then the last tags and metrics, and end the run."""
    client = MlflowClient(store.uri)
    with answering():
        for path, within in files:
            client.log_artifact(run_id, path, within)
        client.log_batch(
            run_id,
            metrics=[Metric(metric_name(name), float(value), stamp_ms, 0) for name, value in metrics.items()],
            tags=[RunTag(key, value) for key, value in tags.items()],
        )
        client.set_terminated(run_id, status)
        run = client.get_run(run_id)
        set_up_view(client, run.info.experiment_id, run.data.metrics)
