"""A study in MLflow: a parent run with its plots, and a run nested in it for each trial, sent by a thread.

Each message has the whole state of a trial, and a trial's run is found by its number in the store, so sending a trial
again, after a crash, an outage or by another process, creates no second run.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowcast.platform.config.run_fields import PLACE, StoreAddress
from narrowcast.platform.errors import StoreError, UserError
from narrowcast.platform.storage.host import host_clock
from narrowcast.platform.tracking.cursor import place_of
from narrowcast.platform.tracking.sender import BackgroundSender
from narrowcast.platform.tracking.store import (
    MLFLOW_SETTINGS,
    STORE_ERRORS,
    answering,
    as_params,
    calls_to,
    metric_name,
    origin_tags,
    short_reason,
)
from narrowcast.platform.tracking.view import set_up_view

with MLFLOW_SETTINGS.in_force():
    from mlflow import MlflowClient
    from mlflow.entities import Metric, RunTag
    from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NOTE

logger = logging.getLogger(__name__)
_POLL_SECONDS, _LAST_SECONDS = 0.2, 4.0
_BATCH = 1000  # metrics, MLflow's limit
_TRIAL = "trial"
_SEVERAL = "several folders"
_STATUS = {"complete": "FINISHED", "pruned": "KILLED", "lost": "KILLED", "failed": "FAILED", "running": "RUNNING"}


@dataclass(frozen=True)
class TrialRun:
    """The state of a trial; `rows` are its evaluations, with `round` and `logged_at_ms`."""

    key: str
    name: str
    state: str
    params: Mapping[str, Any]
    tags: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[Mapping[str, Any], ...] = ()


class StudyStore(BackgroundSender):
    """The nested runs of one parent run, which are sent in the background."""

    kept = "the trials wait"

    def __init__(self, store: StoreAddress, parent: str) -> None:
        super().__init__(store)
        self._parent, self._client = parent, MlflowClient(store.uri)
        self._waiting: deque[TrialRun] = deque()
        self._runs: dict[str, str] = {}
        self._states: dict[str, str] = {}
        self._experiment = ""
        self._missed = 0
        self._measured: dict[str, None] = {}

    def open(self, folder: Path) -> dict[str, str]:
        """Read the states of the trials in the store, and begin to send; raise `UserError` if the store is down.

        A study whose processes have several folders is left running if they are killed: the store knows one folder.
        """
        with calls_to(self._store):
            self._read_states(place_of(folder.resolve()))
        self._start()
        return self.states()

    def _read_states(self, own_place: str) -> None:
        try:
            parent = self._client.get_run(self._parent)
            self._experiment = parent.info.experiment_id
            if parent.data.tags.get(PLACE) != own_place:
                self._client.set_tag(self._parent, PLACE, _SEVERAL)
            self._client.update_run(self._parent, status="RUNNING")
            token: str | None = None
            while True:
                page = self._client.search_runs([self._experiment], self._nested(), page_token=token)
                for run in page:
                    if _TRIAL in run.data.tags:
                        self._runs[run.data.tags[_TRIAL]] = run.info.run_id
                        self._states[run.data.tags[_TRIAL]] = run.data.tags.get("state", "running")
                if not (token := page.token):
                    break
        except STORE_ERRORS as error:
            raise UserError(
                f"the MLflow store at {self._store.shown} cannot continue run {self._parent} ({short_reason(error)})"
            ) from error

    def states(self) -> dict[str, str]:
        """Return the state of each trial in the store, or in the store once the queue is sent."""
        return dict(self._states)

    def put(self, trial: TrialRun) -> None:
        """Queue the state of a trial."""
        self._states[trial.key] = trial.state
        self._waiting.append(trial)
        self.notify()

    def _send(self) -> None:
        while self._waiting:
            trial = self._waiting[0]
            try:
                with calls_to(self._store), answering():
                    self._send_trial(trial)
                self._answered()
            except StoreError:
                raise
            except Exception as error:  # of this trial alone: those after it are still to be sent
                logger.warning("trial %s is not in MLflow (%s)", trial.key, short_reason(error))
                self._missed += 1
            self._waiting.popleft()

    def _nested(self) -> str:
        return f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{self._parent}'"

    def _run_id(self, trial: TrialRun) -> str:
        """Return the id of the trial's run, which another process of the study may have created."""
        if trial.key not in self._runs:
            runs = self._client.search_runs([self._experiment], f"{self._nested()} and tags.{_TRIAL} = '{trial.key}'")
            tags = {**origin_tags(trial.name), MLFLOW_PARENT_RUN_ID: self._parent, _TRIAL: trial.key}
            run = runs[0] if runs else self._client.create_run(self._experiment, run_name=trial.name, tags=tags)
            self._runs[trial.key] = run.info.run_id
        return self._runs[trial.key]

    def _send_trial(self, trial: TrialRun) -> None:
        run_id = self._run_id(trial)
        metrics = [
            Metric(metric_name(name), float(value), row["logged_at_ms"], int(row["round"]))
            for row in trial.rows
            for name, value in row.items()
            if name not in ("round", "logged_at_ms") and value is not None
        ]
        self._measured |= dict.fromkeys(metric.key for metric in metrics)
        tags_now = [RunTag(key, value) for key, value in {**trial.tags, "state": trial.state}.items()]
        self._client.log_batch(run_id, metrics[:_BATCH], as_params(trial.params), tags_now)
        for start in range(_BATCH, len(metrics), _BATCH):
            self._client.log_batch(run_id, metrics[start : start + _BATCH])
        if trial.state != "running":
            self._client.set_terminated(run_id, _STATUS.get(trial.state, "FAILED"))

    def close(self, wait_seconds: float) -> bool:
        """Send the queue, for at most this long; return whether everything was sent."""
        end = host_clock().monotonic() + wait_seconds
        while self._sending is not None and self._waiting and host_clock().monotonic() < end:
            host_clock().sleep(_POLL_SECONDS)
        return self._end(max(end - host_clock().monotonic(), _LAST_SECONDS)) and not self._waiting and not self._missed

    def _has(self, metric: str, step: int) -> bool:
        return any(point.step == step for point in self._client.get_metric_history(self._parent, metric))

    def finish(
        self,
        status: str,
        metrics: Mapping[str, float],
        step: int,
        tags: Mapping[str, str],
        note: str,
        artifacts: Iterable[tuple[Path, str | None]],
    ) -> bool:
        """Log the study's metrics, tags and files to the parent run and end it; return False if the store is down.

        A metric that the run has at `step`, the number of trials that have ended, is not logged again: a process that
        was killed may have got so far. `note` is Markdown for the run's page. `artifacts` are files, each with its
        folder in the run.
        """
        try:
            with calls_to(self._store):
                self._log(metrics, step, {**tags, MLFLOW_RUN_NOTE: note}, artifacts)
                self._client.set_terminated(self._parent, status)
                set_up_view(self._client, self._experiment, self._measured)
        except STORE_ERRORS as error:
            logger.warning("the MLflow store is down (%s)", short_reason(error))
            return False
        return True

    def _log(
        self,
        metrics: Mapping[str, float],
        step: int,
        tags: Mapping[str, str],
        artifacts: Iterable[tuple[Path, str | None]],
    ) -> None:
        stamp = int(1000 * time.time())
        missing = {name: value for name, value in _as_metrics(metrics).items() if not self._has(name, step)}
        self._client.log_batch(
            self._parent,
            [Metric(name, value, stamp, step) for name, value in missing.items()],
            tags=[RunTag(key, value) for key, value in tags.items()],
        )
        for path, within in artifacts:
            self._client.log_artifact(self._parent, str(path), within)


def _as_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Return values by the names that MLflow accepts."""
    return {metric_name(name): float(value) for name, value in values.items()}
