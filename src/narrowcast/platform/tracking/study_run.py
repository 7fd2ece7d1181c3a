"""A study in MLflow: a parent run with its plots, and a run nested in it for each trial, sent by a thread.

What is to be sent is said whole each time, and a trial's run is found by its number, so that saying it again, after a
crash or an outage, leaves one copy.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, RunTag
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NOTE

from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking.mlflow_run import (
    STORE_ERRORS,
    as_params,
    metric_name,
    origin_tags,
    short_reason,
)
from narrowcast.platform.tracking.store_address import hide_password

logger = logging.getLogger(__name__)
_RETRY_SECONDS = 2.0
_AT_ONCE = 1000  # metrics in a batch, MLflow's limit
_TRIAL = "trial"
_STATUS = {"complete": "FINISHED", "pruned": "KILLED", "lost": "KILLED", "failed": "FAILED", "running": "RUNNING"}


@dataclass(frozen=True)
class TrialRun:
    """All that is known of a trial: `rows` have `round` and `logged_at_ms`, `results` stand for the whole trial."""

    key: str
    name: str
    state: str
    params: Mapping[str, Any]
    tags: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[Mapping[str, Any], ...] = ()


class StudyStore:
    """The nested runs of one parent. A thread sends them, and keeps trying while the store is down."""

    def __init__(self, uri: str, parent: str) -> None:
        self._uri, self._parent, self._client = uri, parent, MlflowClient(uri)
        self._waiting: queue.SimpleQueue[TrialRun | None] = queue.SimpleQueue()
        self._runs: dict[str, str] = {}
        self._said: dict[str, str] = {}
        self._experiment = ""
        self._closing = threading.Event()
        self._missed = 0
        self._thread: threading.Thread | None = None

    def open(self) -> dict[str, str]:
        """Look up what is there: the state that the store has of each trial; raises `UserError` where it is down."""
        try:
            parent = self._client.get_run(self._parent)
            self._experiment = parent.info.experiment_id
            self._client.update_run(self._parent, status="RUNNING")
            token: str | None = None
            while True:
                page = self._client.search_runs(
                    [self._experiment],
                    f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{self._parent}'",
                    page_token=token,
                )
                for run in page:
                    if _TRIAL in run.data.tags:
                        self._runs[run.data.tags[_TRIAL]] = run.info.run_id
                        self._said[run.data.tags[_TRIAL]] = run.data.tags.get("state", "running")
                if not (token := page.token):
                    break
        except STORE_ERRORS as error:
            raise UserError(
                f"the MLflow store at {hide_password(self._uri)} cannot go on with run {self._parent} "
                f"({short_reason(error)})"
            ) from error
        self._thread = threading.Thread(target=self._send_all, name="mlflow-study", daemon=True)
        self._thread.start()
        return self.states()

    def states(self) -> dict[str, str]:
        """The state of each trial that the store has, or will have once what waits is sent."""
        return dict(self._said)

    def put(self, trial: TrialRun) -> None:
        """Have the thread send what is known of a trial now."""
        self._said[trial.key] = trial.state
        self._waiting.put(trial)

    def _send_all(self) -> None:
        down = False
        while (trial := self._waiting.get()) is not None:
            while True:
                try:
                    self._send(trial)
                    if down:
                        logger.warning("the MLflow store answers again")
                    down = False
                    break
                except STORE_ERRORS as error:
                    if not down:
                        logger.warning("the MLflow store is down (%s); the trials wait", short_reason(error))
                    down = True
                    if self._closing.wait(_RETRY_SECONDS):
                        self._missed += 1
                        break

    def _send(self, trial: TrialRun) -> None:
        if trial.key not in self._runs:
            tags = {**origin_tags(trial.name), MLFLOW_PARENT_RUN_ID: self._parent, _TRIAL: trial.key}
            run = self._client.create_run(self._experiment, run_name=trial.name, tags=tags)
            self._runs[trial.key] = run.info.run_id
        run_id = self._runs[trial.key]
        metrics = [
            Metric(metric_name(name), float(value), row["logged_at_ms"], int(row["round"]))
            for row in trial.rows
            for name, value in row.items()
            if name not in ("round", "logged_at_ms") and value is not None
        ]
        tags_now = [RunTag(key, value) for key, value in {**trial.tags, "state": trial.state}.items()]
        self._client.log_batch(run_id, metrics[:_AT_ONCE], as_params(trial.params), tags_now)
        for start in range(_AT_ONCE, len(metrics), _AT_ONCE):
            self._client.log_batch(run_id, metrics[start : start + _AT_ONCE])
        if trial.state != "running":
            self._client.set_terminated(run_id, _STATUS.get(trial.state, "FAILED"))

    def close(self, wait_seconds: float) -> bool:
        """Send what waits, for at most this long; whether all was sent."""
        if self._thread is None:
            return True
        self._waiting.put(None)
        self._thread.join(wait_seconds)
        self._closing.set()
        self._thread.join(2 * _RETRY_SECONDS)
        return not self._thread.is_alive() and not self._missed

    def finish(
        self,
        status: str,
        metrics: Mapping[str, float],
        tags: Mapping[str, str],
        note: str,
        artifacts: Iterable[Path],
    ) -> bool:
        """Put the study's results, plots and tables on the parent run and end it; False where the store is down.

        `note` is Markdown that the run's page shows.
        """
        try:
            stamp = time.time()
            self._client.log_batch(
                self._parent,
                [Metric(metric_name(name), float(value), int(1000 * stamp), 0) for name, value in metrics.items()],
                tags=[RunTag(key, value) for key, value in {**tags, MLFLOW_RUN_NOTE: note}.items()],
            )
            for path in artifacts:
                if path.is_dir():
                    self._client.log_artifacts(self._parent, str(path), path.name)
                elif path.is_file():
                    self._client.log_artifact(self._parent, str(path))
            self._client.set_terminated(self._parent, status)
        except STORE_ERRORS as error:
            logger.warning("the MLflow store is down (%s)", short_reason(error))
            return False
        return True
