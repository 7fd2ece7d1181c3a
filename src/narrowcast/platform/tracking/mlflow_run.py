"""A run in MLflow: created before round 1, updated by a thread during the run, closed with its artifacts.

The journal is written first. A thread sends its rows and records its position in `tracking.json`, so that an outage of
the store delays metrics and loses none. A round that is sent twice is stored once, since its timestamps are those of
the journal. Importing this does not import MLflow, which `mlflow_store` calls.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from narrowcast.platform.atomic_files import write_atomically
from narrowcast.platform.described import Described
from narrowcast.platform.errors import StoreError, UserError
from narrowcast.platform.host_time import host_time
from narrowcast.platform.redaction import redact
from narrowcast.platform.tracking.journal import Journal
from narrowcast.platform.tracking.second_process import MLFLOW, call
from narrowcast.platform.tracking.store_address import Tracking

logger = logging.getLogger(__name__)
STORE_ERRORS = (StoreError, OSError)
_CURSOR = "tracking.json"
_RETRY_SECONDS = 5.0
_METRICS_AT_ONCE = 1000  # MLflow's limit per request
_ROWS_AT_ONCE = 100  # a row has more than ten metrics
_LARGEST_ARTIFACT_BYTES = 10**9  # the state of error feedback is larger, and only a resume needs it


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
    call(MLFLOW, "check_store", uri)


def open_run(
    tracking: Tracking, output: Path, name: str, params: Mapping[str, Any], tags: Mapping[str, str], data: Described
) -> tuple[str, str]:
    """Create an MLflow run with its params, tags and data set; return the URI of the store and the run's id."""
    uri = tracking.resolve(output)
    artifacts = (output.resolve() / "mlartifacts").as_uri() if uri.startswith("sqlite:") else None
    shown = {key: redact(str(value)) for key, value in params.items()}
    about = {
        "name": data.name,
        "digest": data.digest[:32],
        "source_type": "local",
        "source": json.dumps({"uri": redact(data.source)}),
        "profile": json.dumps(dict(data.sizes)),
    }
    return uri, str(call(MLFLOW, "open_run", uri, tracking.experiment, artifacts, name, shown, dict(tags), about))


def reopen_run(uri: str, run_id: str) -> None:
    """Mark a run as running again; raise `UserError` if the store does not know it."""
    call(MLFLOW, "reopen_run", uri, run_id)


def send_rounds(uri: str, run_id: str, rows: Sequence[Mapping[str, Any]]) -> int:
    """Send the first rows, as many as fit one batch of metrics; return their number."""
    totals = accumulate(len(row) for row in rows)
    fitting = max(1, sum(total <= _METRICS_AT_ONCE for total in totals))
    call(MLFLOW, "send_rounds", uri, run_id, [dict(row) for row in rows[:fitting]])
    return min(fitting, len(rows))


def monitor_system(uri: str, run_id: str, *, enabled: bool, resume: bool) -> Callable[[], None]:
    """Log the load of this machine to the run until the returned function is called."""
    if not enabled:
        return lambda: None
    call(MLFLOW, "start_monitor", uri, run_id, resume)
    return lambda: call(MLFLOW, "finish_monitor", run_id)


def close_run(folder: Path, uri: str, cursor: Cursor, tags: Mapping[str, str], metrics: Mapping[str, float]) -> bool:
    """Log the folder of a run as artifacts with its last tags and metrics, and end it; False if the store is down.

    Files above 1 GB stay in the folder. The metrics have the time stamp of `result.json`, so that closing a run twice
    stores one copy.
    """
    try:
        files = []
        for path in sorted(folder.rglob("*")):
            if not path.is_file() or path.name in (_CURSOR, "journal.jsonl"):
                continue
            if (size := path.stat().st_size) > _LARGEST_ARTIFACT_BYTES:
                logger.warning("%s (%.1f GB) is too large for MLflow and stays there", path, size / 1e9)
                continue
            within = path.parent.relative_to(folder).as_posix()
            files.append((str(path), None if within == "." else within))
        finished = int((folder / "result.json").stat().st_mtime * 1000) if metrics else 0
        call(MLFLOW, "close_run", uri, cursor.run_id, files, dict(tags), dict(metrics), finished, cursor.status)
        replace(cursor, closed=True).save(folder)
    except STORE_ERRORS as error:
        logger.warning("the MLflow store is down (%s)", _reason(error))
        return False
    return True


class Sender:
    """Sends the journal's rounds in the background, retries while the store is down, and records its position."""

    def __init__(self, folder: Path, uri: str, cursor: Cursor, journal: Journal) -> None:
        """Begin to send. The journal's list of rows, which grows, is only read here."""
        self._folder, self._journal = folder, journal
        self.cursor = cursor
        self._uri = uri
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
                rows = self._journal.rounds[before : before + _ROWS_AT_ONCE]
                self._journal.sync()  # a round that a power cut took would be sent again with another time stamp
                sent = send_rounds(self._uri, self.cursor.run_id, rows)
                self.cursor = replace(self.cursor, sent_rounds=before + sent)
                if self._down:
                    self._down = False
                    logger.warning("the MLflow store answers again")
            self.cursor.save(self._folder)
        except STORE_ERRORS as error:
            if not self._down:
                logger.warning("the MLflow store is down (%s); metrics are kept on disk", _reason(error))
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


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, StoreError) else redact(f"{type(error).__name__}: {error}")
