"""A run in MLflow: created before round 1, updated by a thread during the run, closed with its artifacts.

The journal is written first. A thread sends its rows and records its position in `tracking.json`, so that an outage of
the store delays metrics and loses none. A round that is sent twice is stored once, since its timestamps are those of
the journal.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import requests

# Time limits for calls to a store that is down, and no telemetry; MLflow reads all of them at run time.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "5")
# MLflow would print the address of each finished run, with the password in it.
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import (
    MLFLOW_DATASET_CONTEXT,
    MLFLOW_RUN_NAME,
    MLFLOW_SOURCE_NAME,
    MLFLOW_SOURCE_TYPE,
    MLFLOW_USER,
)
from packaging.version import Version
from sqlalchemy import create_engine
from sqlalchemy.exc import SQLAlchemyError

from narrowcast.platform.atomic_files import write_atomically
from narrowcast.platform.contracts import Dataset as ClientData
from narrowcast.platform.errors import UserError
from narrowcast.platform.host_time import host_time
from narrowcast.platform.redaction import check_address, has_hidden, hide_secrets, redact
from narrowcast.platform.tracking.journal import Journal
from narrowcast.platform.tracking.mlflow_internals import SystemMonitor, has_store
from narrowcast.platform.tracking.mlflow_view import PAGE, set_up_view
from narrowcast.platform.tracking.sqlite_file import make_sqlite_file
from narrowcast.platform.tracking.store_address import Tracking

logger = logging.getLogger(__name__)
STORE_ERRORS = (MlflowException, SQLAlchemyError, requests.RequestException, OSError)
_CURSOR = "tracking.json"
_RETRY_SECONDS = 5.0
_PROBE_SECONDS = 5.0
_PARAMS_AT_ONCE = 100
_METRICS_AT_ONCE = 1000  # MLflow's limit per request
_DATABASES = ("postgresql", "mysql", "sqlite", "mssql")  # the databases that MLflow documents
_LARGEST_ARTIFACT_BYTES = 10**9  # the state of error feedback is larger, and only a resume needs it

# One warning of ours reports an outage; MLflow's would be many, some with the password.
for _noisy in ("alembic", "mlflow", "urllib3.connectionpool"):
    logging.getLogger(_noisy).setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class Cursor:
    """The part of a run that the store has. `uri` is without secrets; `status` is MLflow's status of the run."""

    uri: str
    run_id: str
    sent_rounds: int = 0
    closed: bool = False
    status: str = "FAILED"

    @classmethod
    def load(cls, folder: Path) -> Cursor:
        """Read `tracking.json` of a run's folder; raise `UserError` if there is none."""
        try:
            return cls(**json.loads((folder / _CURSOR).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{folder} holds no run that was tracked ({error}); give a run's folder") from error

    def save(self, folder: Path) -> None:
        """Write `tracking.json`."""
        write_atomically(folder / _CURSOR, json.dumps(asdict(self)).encode())


def check_store(uri: str) -> None:
    """Raise `UserError` within seconds if no tracking store answers at the URI."""
    shown = hide_secrets(uri)
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
        raise UserError(
            f"no MLflow store answers at {shown} ({short_reason(error)}); start it, or set tracking.uri or "
            "MLFLOW_TRACKING_URI to a store that answers"
        ) from error


def pages_of_runs(uri: str) -> dict[str, str]:
    """Return the page of the MLflow UI for each experiment with runs, by its name; raise as `check_store` does."""
    check_store(uri)
    client = MlflowClient(uri)
    return {
        each.name: PAGE.format(experiment_id=each.experiment_id)
        for each in client.search_experiments()
        if client.search_runs([each.experiment_id], max_results=1)
    }


def short_reason(error: BaseException) -> str:
    """Return a store's error in one line, without a password."""
    while isinstance(error, requests.ConnectionError) and error.args and isinstance(error.args[0], Exception):
        error = getattr(error.args[0], "reason", None) or error.args[0]
    lines = [line for line in str(error).splitlines() if not line.startswith("(raised as a result of")]
    text = redact(lines[0] if lines else "")
    return f"{type(error).__name__}: {text[:160]}".rstrip(": ")


def open_run(
    tracking: Tracking,
    output: Path,
    name: str,
    params: Mapping[str, Any],
    tags: Mapping[str, str],
    data: ClientData,
) -> tuple[str, str]:
    """Create an MLflow run with its params, tags and data set; return the URI of the store and the run's id."""
    uri = tracking.resolve(output)
    client = MlflowClient(uri)
    try:
        run = client.create_run(
            experiment_id(client, uri, tracking.experiment, output),
            run_name=name,
            tags={**tags, **origin_tags(name)},
        )
        entries = as_params(params)
        for start in range(0, len(entries), _PARAMS_AT_ONCE):
            client.log_batch(run.info.run_id, params=entries[start : start + _PARAMS_AT_ONCE])
        try:
            client.log_inputs(run.info.run_id, [_dataset_input(data)])
        except MlflowException:  # another run has just created the entry of the data set
            client.log_inputs(run.info.run_id, [_dataset_input(data)])
    except STORE_ERRORS as error:
        raise UserError(
            f"the MLflow store at {hide_secrets(uri)} refused the run ({short_reason(error)}); check it"
        ) from error
    return uri, run.info.run_id


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


def experiment_id(client: MlflowClient, uri: str, name: str, output: Path) -> str:
    """Return the id of an MLflow experiment, which is created if it is missing."""
    known = client.get_experiment_by_name(name)
    if known is not None:
        return str(known.experiment_id)
    artifacts = (output.resolve() / "mlartifacts").as_uri() if uri.startswith("sqlite:") else None
    created = str(client.create_experiment(name, artifact_location=artifacts))
    set_up_view(client, created)
    return created


def _dataset_input(data: ClientData) -> DatasetInput:
    dataset = Dataset(
        name=data.name,
        digest=data.digest[:32],
        source_type="local",
        source=json.dumps({"uri": redact(data.source)}),
        profile=json.dumps(dict(data.sizes)),
    )
    return DatasetInput(dataset, [InputTag(MLFLOW_DATASET_CONTEXT, "training")])


def send_rounds(client: MlflowClient, run_id: str, rows: Iterable[Mapping[str, Any]]) -> int:
    """Send the first rows, as many as fit one batch of metrics; return their number."""
    metrics: list[Metric] = []
    sent = 0
    for row in rows:
        of_round = [
            Metric(metric_name(name), float(value), row["logged_at_ms"], row["round"])
            for name, value in sorted(row.items(), key=_by_interest)
            if name not in ("round", "logged_at_ms") and value is not None
        ]
        if metrics and len(metrics) + len(of_round) > _METRICS_AT_ONCE:
            break
        metrics += of_round
        sent += 1
    client.log_batch(run_id, metrics=metrics)
    return sent


def _by_interest(entry: tuple[str, Any]) -> int:
    """Order the metrics of a round: pages of MLflow that compare runs begin with the metric that came first."""
    name, _ = entry
    return 0 if name.startswith("test.") else 1 if name.startswith("validation.") else 2 if name == "loss" else 3


def metric_name(name: str) -> str:
    """Return the name with @, which MLflow refuses, spelled out: hr@10 becomes hr_at_10."""
    return name.replace("@", "_at_")


class Sender:
    """Sends the journal's rounds in the background, retries while the store is down, and records its position."""

    def __init__(self, folder: Path, uri: str, cursor: Cursor, journal: Journal) -> None:
        """Begin to send. The journal's list of rows, which grows, is only read here."""
        self._folder, self._journal = folder, journal
        self.cursor = cursor
        self._client = MlflowClient(uri)
        self._down = False
        self._sending = host_time().repeat(self._send, _RETRY_SECONDS, "mlflow-sender")

    def notify(self) -> None:
        """Send soon, since the journal has new rounds."""
        self._sending.wake()

    def _send(self) -> None:
        """Send what the store lacks, as far as it answers."""
        try:
            while not self._caught_up():
                before = self.cursor.sent_rounds
                rows = self._journal.rounds[before : before + _METRICS_AT_ONCE]
                self._journal.sync()  # a round that a power cut took would be sent again with another time stamp
                sent = send_rounds(self._client, self.cursor.run_id, rows)
                self.cursor = replace(self.cursor, sent_rounds=before + sent)
                if self._down:
                    self._down = False
                    logger.warning("the MLflow store answers again")
            self.cursor.save(self._folder)
        except STORE_ERRORS as error:
            if not self._down:
                logger.warning("the MLflow store is down (%s); metrics are kept on disk", short_reason(error))
            self._down = True

    def _caught_up(self) -> bool:
        return self.cursor.sent_rounds >= len(self._journal.rounds)

    def close(self, wait_seconds: float, status: str) -> bool:
        """Send the remaining rounds of a run that ended with `status`; return whether all were sent in time."""
        ended = self._sending.close(wait_seconds)
        self.cursor = replace(self.cursor, status=status)
        try:
            if ended:
                self.cursor.save(self._folder)
        except OSError:  # the run's own error, a full disk perhaps, is the one to report
            return False
        return self._caught_up()


def monitor_system(uri: str, run_id: str, *, enabled: bool, resume: bool) -> Callable[[], None]:
    """Log the load of this machine to the run until the returned function is called."""
    if not enabled:
        return lambda: None
    return SystemMonitor(uri, run_id, resume=resume).finish


def reopen_run(uri: str, run_id: str) -> None:
    """Mark a run as running again; raise `UserError` if the store does not know it."""
    try:
        MlflowClient(uri).update_run(run_id, status="RUNNING")
    except STORE_ERRORS as error:
        raise UserError(
            f"the store at {hide_secrets(uri)} cannot continue MLflow run {run_id} ({short_reason(error)})"
        ) from error


def close_run(folder: Path, uri: str, cursor: Cursor, tags: Mapping[str, str], metrics: Mapping[str, float]) -> bool:
    """Log the folder of a run as artifacts with its last tags and metrics, and end it; False if the store is down.

    Files above 1 GB stay in the folder. The metrics have the time stamp of `result.json`, so that closing a run twice
    stores one copy.
    """
    client = MlflowClient(uri)
    try:
        for path in sorted(folder.rglob("*")):
            if not path.is_file() or path.name in (_CURSOR, "journal.jsonl"):
                continue
            if (size := path.stat().st_size) > _LARGEST_ARTIFACT_BYTES:
                logger.warning("%s (%.1f GB) is too large for MLflow and stays there", path, size / 1e9)
                continue
            within = path.parent.relative_to(folder).as_posix()
            client.log_artifact(cursor.run_id, str(path), None if within == "." else within)
        finished = int((folder / "result.json").stat().st_mtime * 1000) if metrics else 0
        client.log_batch(
            cursor.run_id,
            metrics=[Metric(metric_name(name), float(value), finished, 0) for name, value in metrics.items()],
            tags=[RunTag(key, value) for key, value in tags.items()],
        )
        client.set_terminated(cursor.run_id, cursor.status)
        run = client.get_run(cursor.run_id)
        set_up_view(client, run.info.experiment_id, run.data.metrics)
        replace(cursor, closed=True).save(folder)
    except STORE_ERRORS as error:
        logger.warning("the MLflow store is down (%s)", short_reason(error))
        return False
    return True
