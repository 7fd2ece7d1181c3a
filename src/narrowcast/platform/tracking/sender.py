"""A run in MLflow: created before round 1, updated by a thread during the run, closed with its artifacts.

The journal is written first. A thread sends its rows and records its position in `tracking.json`, so that an outage of
the store delays metrics and loses none. A round that is sent twice is stored once, since its timestamps are those of
the journal. Importing this does not import MLflow, which `mlflow_store` calls.
"""

from __future__ import annotations

import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

from narrowcast.platform.config.redaction import redact
from narrowcast.platform.config.run_fields import StoreAddress, Tracking
from narrowcast.platform.config.trust import own_files
from narrowcast.platform.errors import StoreError, StoreRefused, described
from narrowcast.platform.storage.host import PeriodicTask, host_clock
from narrowcast.platform.storage.journal import Journal
from narrowcast.platform.tracking.cursor import CURSOR, Cursor
from narrowcast.platform.tracking.second_process import CallsClosedError, call, mlflow_store
from narrowcast.platform.types import RunInput

logger = logging.getLogger(__name__)
_RETRY_SECONDS = 5.0
_METRICS_AT_ONCE = 1000  # MLflow's limit per request
_ROWS_AT_ONCE = 100  # a row has more than ten metrics
_LARGEST_ARTIFACT_BYTES = 10**9  # the state of error feedback is larger, and only a resume needs it


def check_store(store: StoreAddress, remedy: str = "set tracking.credentials=environment") -> None:
    """Raise `UserError` within seconds if no tracking store answers at the address.

    `remedy` is how the user lets the store have the credentials of the environment.
    """
    store.say_what_is_withheld(remedy)
    call(mlflow_store.check_store, store)


def open_run(
    folder: Path,
    tracking: Tracking,
    params: Mapping[str, Any],
    tags: Mapping[str, str],
    data: RunInput | Mapping[str, str],
    store: StoreAddress,
) -> Cursor:
    """Create an MLflow run of the folder's name with its params, tags and data set, and return its first position.

    `data` may be `Cursor.data` of an earlier run. What killed processes have left running in the store is ended as
    killed: the runs of this folder, in which a process that begins a run is alone, and `is_abandoned` ones beside it.
    """
    artifacts = (folder.parent.resolve() / "mlartifacts").as_uri() if store.uri.startswith("sqlite:") else None
    shown = {key: redact(str(value)) for key, value in params.items()}
    about = dict(data) if isinstance(data, Mapping) else _dataset(data)
    arguments = (store, tracking.experiment, artifacts, folder.resolve(), shown, dict(tags), about)
    run_id = str(call(mlflow_store.open_run, *arguments))
    return Cursor(store.shown, run_id, folder=str(folder.resolve()), tags=dict(tags), data=about)


def _dataset(data: RunInput) -> dict[str, str]:
    return {
        "name": data.name,
        "digest": data.digest[:32],
        "source_type": "local",
        "source": json.dumps({"uri": redact(data.source)}),
        "profile": json.dumps(dict(data.sizes)),
    }


def reopen_run(store: StoreAddress, run_id: str) -> None:
    """Mark a run as running again; raise `UserError` if the store refuses."""
    call(mlflow_store.reopen_run, store, run_id)


def why_lost(folder: Path, store: StoreAddress, cursor: Cursor | None) -> str:
    """Return why the run of a folder needs another MLflow run, empty if it goes on in its own.

    Raise `UserError` if the store does not answer.
    """
    if cursor is None:
        return f"{folder / CURSOR} is missing or damaged"
    original = Path(cursor.folder)
    is_copy = cursor.folder and original != folder.resolve()
    if is_copy and (other := Cursor.find(original)) is not None and other.run_id == cursor.run_id:
        return f"{folder} is a copy of {original}, to which MLflow run {cursor.run_id} belongs"
    try:
        if call(mlflow_store.has_run, store, cursor.run_id):
            return ""
    except StoreError as error:
        raise StoreRefused(f"no MLflow store answers at {store.shown} ({error}); start it, then try again") from error
    return f"the MLflow store at {store.shown} has no run {cursor.run_id}, or it was deleted"


def send_rounds(store: StoreAddress, run_id: str, rows: Sequence[Mapping[str, Any]]) -> int:
    """Send the first rows, as many as fit one batch of metrics; return their number."""
    totals = accumulate(len(row) for row in rows)
    fitting = max(1, sum(total <= _METRICS_AT_ONCE for total in totals))
    call(mlflow_store.send_rounds, store, run_id, [dict(row) for row in rows[:fitting]])
    return min(fitting, len(rows))


def monitor_system(store: StoreAddress, run_id: str, *, enabled: bool, resume: bool) -> Callable[[], None]:
    """Log the load of this machine to the run until the returned function is called."""
    if not enabled:
        return lambda: None
    call(mlflow_store.start_monitor, store, run_id, resume)
    return lambda: call(mlflow_store.finish_monitor, run_id)


def close_run(
    folder: Path, store: StoreAddress, cursor: Cursor, tags: Mapping[str, str], metrics: Mapping[str, float]
) -> bool:
    """Log the folder of a run as artifacts with its last tags and metrics, and end it; False if the store is down.

    Files above 1 GB stay in the folder. The metrics have the time stamp of `result.json`, so that closing a run twice
    stores one copy.
    """
    try:
        files = []
        for path in own_files(folder):
            if path.name in (CURSOR, "journal.jsonl"):
                continue
            if (size := path.stat().st_size) > _LARGEST_ARTIFACT_BYTES:
                logger.warning("%s (%.1f GB) is too large for MLflow and stays there", path, size / 1e9)
                continue
            within = path.parent.relative_to(folder).as_posix()
            files.append((str(path), None if within == "." else within))
        finished = int((folder / "result.json").stat().st_mtime * 1000) if metrics else 0
        call(mlflow_store.close_run, store, cursor.run_id, files, dict(tags), dict(metrics), finished, cursor.status)
        replace(cursor, closed=True).save(folder)
    except CallsClosedError:
        return False
    except StoreError as error:
        logger.warning("the MLflow store is down (%s)", error)
        return False
    except OSError as error:
        logger.warning("cannot read or write files of %s (%s)", folder, error)
        return False
    return True


class _Outages:
    """The senders of this process whose store does not answer, so that one outage is reported once, by store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, set[int]] = {}

    def begin(self, uri: str, sender: object, text: str) -> None:
        """Report the outage unless another sender has."""
        with self._lock:
            waiting = self._waiting.setdefault(uri, set())
            if not waiting:
                logger.warning("the MLflow store is down %s", text)
            waiting.add(id(sender))

    def end(self, uri: str, sender: object, *, answered: bool = True) -> None:
        """Report that the store answers once all senders have been answered; one that has ended waits no more."""
        with self._lock:
            waiting = self._waiting.get(uri, set())
            if id(sender) in waiting:
                waiting.remove(id(sender))
                if answered and not waiting:
                    logger.warning("the MLflow store answers again")


_outages = _Outages()


class BackgroundSender(ABC):
    """Sends in the background what a store lacks, and again while the store, the disk or anything else fails.

    Each failure is logged once.
    """

    kept: ClassVar[str]
    """The effect of an outage on what is not sent yet, for the warning."""

    def __init__(self, store: StoreAddress) -> None:
        self._store = store
        self._sending: PeriodicTask | None = None
        self._said: set[str] = set()

    @abstractmethod
    def _send(self) -> None:
        """Send what is unsent; call `_answered` after each part. Raise `StoreError` if the store stops responding."""

    def _failure(self, error: Exception) -> str:
        """Return what is said of a failure that is not the store's."""
        return f"not all is sent to MLflow ({described(error)})"

    def _start(self) -> None:
        self._sending = host_clock().run_periodically(self._try, _RETRY_SECONDS, "mlflow-sender")

    def notify(self) -> None:
        """Send soon, since there is more."""
        if self._sending is not None:
            self._sending.wake()

    def _answered(self) -> None:
        _outages.end(self._store.uri, self)

    def _try(self) -> None:
        try:
            self._send()
        except CallsClosedError:  # the run was stopped, which is not the store's fault
            return
        except StoreError as error:
            _outages.begin(self._store.uri, self, f"({error}); {self.kept}")
        except Exception as error:  # said, and what was not sent is tried again
            if (text := self._failure(error)) not in self._said:
                logger.warning("%s", text)
                self._said.add(text)

    def _end(self, wait_seconds: float) -> bool:
        """Send a last time; return whether that ended within the time."""
        ended = self._sending is None or self._sending.close(wait_seconds)
        _outages.end(self._store.uri, self, answered=False)
        return ended


class Sender(BackgroundSender):
    """Sends the journal's rounds in the background, and records its position."""

    kept = "metrics are kept on disk"

    def __init__(self, folder: Path, store: StoreAddress, cursor: Cursor, journal: Journal) -> None:
        """Begin to send. The journal's list of rows, which grows, is only read here."""
        super().__init__(store)
        self._folder, self._journal = folder, journal
        self.cursor = cursor
        self._start()

    def _send(self) -> None:
        while not self._caught_up():
            before = self.cursor.sent_rounds
            rows = self._journal.rounds[before : before + _ROWS_AT_ONCE]
            self._journal.sync()  # a round that a power cut took would be sent again with another time stamp
            sent = send_rounds(self._store, self.cursor.run_id, rows)
            self.cursor = replace(self.cursor, sent_rounds=before + sent)
            self._answered()
        self.cursor.save(self._folder)

    def _failure(self, error: Exception) -> str:
        if isinstance(error, OSError):
            return f"cannot write to {self._folder} ({error}); its rounds are not sent until that works"
        return f"the rounds of {self._folder} are not sent to MLflow ({described(error)})"

    def _caught_up(self) -> bool:
        return self.cursor.sent_rounds >= len(self._journal.rounds)

    def close(self, wait_seconds: float, status: str) -> bool:
        """Send the remaining rounds of a run that ended with `status`; return whether all were sent in time."""
        ended = self._end(wait_seconds)
        self.cursor = replace(self.cursor, status=status)
        try:
            if ended:
                self.cursor.save(self._folder)
        except OSError:  # the run's own error, a full disk perhaps, is the one to report
            return False
        return self._caught_up()
