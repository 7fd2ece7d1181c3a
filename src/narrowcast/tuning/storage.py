"""Storage of a study: a journal file, or any database that Optuna supports."""

from __future__ import annotations

import json
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend, JournalFileSymlinkLock
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, InterfaceError, NoSuchModuleError, OperationalError, SQLAlchemyError

from narrowcast.platform.config.redaction import check_address, hide_secrets, redact
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.storage.disk import disk, make_folders
from narrowcast.platform.storage.host import defer_signals

logger = logging.getLogger(__name__)
optuna.logging.set_verbosity(optuna.logging.ERROR)

_OUTAGES = (StorageInternalError, OperationalError, InterfaceError, OSError)
_DAMAGE = (AssertionError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)
"""Errors of Optuna on journals whose lines are not its own."""
_RETRY_SECONDS = 0.5
_CONNECT_SECONDS = 5


def open_storage(storage: str, timeout_seconds: float) -> BaseStorage:
    """Open a database by its URL or a journal file by its path, and retry its calls for up to `timeout_seconds`.

    Raise `UserError` if the storage does not answer now.
    """
    check_address(storage, "study.storage")
    shown = hide_secrets(storage)
    try:
        mend = partial(_drop_cut_line, Path(storage)) if "://" not in storage else lambda: None
        return cast(BaseStorage, _RetryingStorage(_connect(storage), timeout_seconds, mend))
    except (ArgumentError, NoSuchModuleError) as error:
        raise UserError(
            f'study.storage = "{shown}" is not a database URL; write postgresql://user@host/name, sqlite:///file.db, '
            "or the path of a journal file"
        ) from error
    except ImportError as error:
        raise UserError(
            f"study.storage = {shown}: {error}; for PostgreSQL install narrowcast[server], else the database's driver"
        ) from error
    except (SQLAlchemyError, StorageInternalError, OSError) as error:
        raise UserError(
            f"no storage answers at {shown} ({_reason(error)}); start it, or correct study.storage"
        ) from None


def _connect(storage: str) -> BaseStorage:
    if "://" not in storage:
        return _open_journal(Path(storage))
    on_postgresql = make_url(storage).get_backend_name() == "postgresql"
    arguments = {"connect_timeout": _CONNECT_SECONDS} if on_postgresql else {}
    engine = {"pool_pre_ping": True, "connect_args": arguments}
    return optuna.storages.get_storage(RDBStorage(storage, engine_kwargs=engine))


def _open_journal(path: Path) -> BaseStorage:
    """Open a journal file. Optuna syncs each line before it returns, so that a power cut loses none of those."""
    path = path.absolute()  # the lock is a symbolic link to this, and must not dangle: see `acquire`
    make_folders(path.parent)
    backend = JournalFileBackend(str(path), lock_obj=JournalFileSymlinkLock(str(path)))
    disk().sync(path.parent)
    _drop_cut_line(path)
    try:
        storage = JournalStorage(backend)
        json.loads(path.read_bytes().splitlines()[-1] if path.stat().st_size else b"{}")  # the one that Optuna forgives
        return storage
    except _DAMAGE as error:
        line = _first_damaged(path)
        kept = f"keep the {line - 1} before it, after which the study goes on" if line > 1 else "remove the file"
        raise UserError(
            f"{path}: line {line} is not one of a study ({_reason(error)}); {kept}, or give another study.storage"
        ) from error


class _Lines(BaseJournalBackend):
    """The lines of a journal, in memory and never written."""

    def __init__(self, lines: Sequence[dict[str, Any]]) -> None:
        self._lines = lines

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        return iter(self._lines[log_number_from:])

    def append_logs(self, logs: list[dict[str, Any]]) -> None:  # noqa: ARG002 - as the library calls it
        raise OSError("lines in memory are only read")


def _first_damaged(path: Path) -> int:
    """Return the number of the first line that Optuna cannot follow."""
    lines: list[Any] = []
    for line in path.read_bytes().splitlines():
        try:
            lines.append(json.loads(line))
        except (ValueError, RecursionError):
            break

    def is_damaged(count: int) -> bool:
        try:
            JournalStorage(_Lines(lines[:count]))
        except _DAMAGE:
            return True
        return False

    return 1 + bisect_left(range(1, len(lines) + 1), True, key=is_damaged)


def _drop_cut_line(path: Path) -> None:
    """Remove a last line that a killed writer or a power cut left; Optuna cannot read a journal with more after it."""
    if _intact_bytes(path) == path.stat().st_size:
        return
    lock = JournalFileSymlinkLock(str(path.absolute()))
    lock.acquire()
    try:
        intact = _intact_bytes(path)  # the holder of the lock has finished its line
        if intact < path.stat().st_size:
            logger.warning("%s: the last line was cut and is dropped", path)
            disk().truncate(path, intact)
    finally:
        lock.release()


def _intact_bytes(path: Path) -> int:
    """Return the size of a journal without a last line that is incomplete or no JSON."""
    content = path.read_bytes()
    before = content.rfind(b"\n", 0, -1) + 1
    try:
        json.loads(content[before:])
    except (ValueError, RecursionError):
        return before
    return len(content) if content.endswith(b"\n") else before


def _reason(error: BaseException) -> str:
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = redact(str(cause)).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0][:160] if lines else ''}".rstrip(": ")


class _RetryingStorage:
    """A storage whose calls are repeated while the database is down.

    Each call is one transaction. If a call succeeded and only its answer was lost, the repetition finds the work done,
    and the caller gets Optuna's exception for that.
    """

    def __init__(self, storage: BaseStorage, timeout_seconds: float, mend: Callable[[], None]) -> None:
        self._storage, self._timeout_seconds, self._mend = storage, timeout_seconds, mend

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._storage, name)
        return self._retrying(attribute) if callable(attribute) else attribute

    def _retrying(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def retry(*args: Any, **options: Any) -> Any:
            began, warned = time.monotonic(), False
            while True:
                try:
                    with defer_signals():  # an interrupt would leave the storage's cache out of step with the database
                        answer = call(*args, **options)
                except (AssertionError, json.JSONDecodeError) as error:
                    raise RunFailed(
                        f"the study's storage is damaged ({_reason(error)}); give the same command, which says where"
                    ) from error
                except _OUTAGES as error:
                    if time.monotonic() - began > self._timeout_seconds:
                        raise RunFailed(
                            f"the study's storage has not answered for {self._timeout_seconds:g} s ({_reason(error)}); "
                            "start it, then give the same command to continue"
                        ) from None
                    if not warned:
                        logger.warning("the study's storage is down (%s); waiting for it", _reason(error))
                        warned = True
                    time.sleep(_RETRY_SECONDS)
                    with suppress(OSError):
                        self._mend()  # a full disk may have cut the line of the call
                    continue
                if warned:
                    logger.warning("the study's storage answers again")
                return answer

        return retry
