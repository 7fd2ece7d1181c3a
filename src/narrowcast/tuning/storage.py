"""Where a study is kept: a journal file, or any database that Optuna speaks to."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, InterfaceError, NoSuchModuleError, OperationalError, SQLAlchemyError

from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.interruption import uninterrupted

logger = logging.getLogger(__name__)
optuna.logging.set_verbosity(optuna.logging.ERROR)

_OUTAGES = (StorageInternalError, OperationalError, InterfaceError, OSError)
_RETRY_SECONDS = 0.5
_CONNECT_SECONDS = 5


def open_storage(storage: str, patience_seconds: float) -> BaseStorage:
    """Open a storage by its URL, or a journal file by its path; raises `UserError` where it does not answer."""
    shown = hide_password(storage)
    try:
        if "://" not in storage:
            return _patient(_journal(Path(storage)), patience_seconds)
        arguments = (
            {"connect_timeout": _CONNECT_SECONDS} if make_url(storage).get_backend_name() == "postgresql" else {}
        )
        engine = {"pool_pre_ping": True, "connect_args": arguments}
        return _patient(
            optuna.storages.get_storage(RDBStorage(storage, engine_kwargs=engine)),
            patience_seconds,
        )
    except (ArgumentError, NoSuchModuleError) as error:
        raise UserError(
            f'study.storage = "{shown}" is no database URL; write postgresql://user@host/name, sqlite:///file.db, or '
            "the path of a journal file"
        ) from error
    except ImportError as error:
        raise UserError(
            f"study.storage = {shown}: {error}; for PostgreSQL install narrowcast[server], else the database's driver"
        ) from error
    except (SQLAlchemyError, StorageInternalError, OSError) as error:
        raise UserError(
            f"no storage answers at {shown} ({_reason(error)}); start it, or correct study.storage"
        ) from None


def _journal(path: Path) -> BaseStorage:
    path.parent.mkdir(parents=True, exist_ok=True)
    backend = JournalFileBackend(str(path))
    _drop_half_a_line(path, backend)
    try:
        return JournalStorage(backend)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is no journal of a study ({error}); remove it, or give another study.storage"
        ) from error


def _drop_half_a_line(path: Path, backend: JournalFileBackend) -> None:
    """Take away what a writer that was killed left of its last line: after more lines Optuna could read none."""
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        with optuna.storages.journal._file.get_lock_file(backend._lock):
            content = path.read_bytes()  # whoever held the lock has finished its line
            os.truncate(path, content.rfind(b"\n") + 1)


def hide_password(storage: str) -> str:
    """The URL with `***` in place of its password, wherever that stands."""
    shown = re.sub(r"//([^/?#:@]*):[^/?#]*@", r"//\1:***@", storage)
    return re.sub(r"(password=)[^&]*", r"\1***", shown)


def _reason(error: BaseException) -> str:
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = hide_password(str(cause)).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0][:160] if lines else ''}".rstrip(": ")


class _Patient:
    """A storage whose every call is made again while the database is down.

    Each call is a transaction. Where one went through and only its answer was lost, the second try finds its work
    done: what Optuna says of that is for the caller to see.
    """

    def __init__(self, storage: BaseStorage, seconds: float) -> None:
        self._storage, self._seconds = storage, seconds

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._storage, name)
        return self._patiently(found) if callable(found) else found

    def _patiently(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def again(*args: Any, **options: Any) -> Any:
            began, warned = time.monotonic(), False
            while True:
                try:
                    with uninterrupted():  # the storage's own memory of what it wrote must not be cut short
                        answer = call(*args, **options)
                except _OUTAGES as error:
                    if time.monotonic() - began > self._seconds:
                        raise RunFailed(
                            f"the study's storage has not answered for {self._seconds:g} s ({_reason(error)}); "
                            "start it, then give the same command to go on"
                        ) from None
                    if not warned:
                        logger.warning("the study's storage is down (%s); waiting for it", _reason(error))
                        warned = True
                    time.sleep(_RETRY_SECONDS)
                    continue
                if warned:
                    logger.warning("the study's storage answers again")
                return answer

        return again


def _patient(storage: BaseStorage, seconds: float) -> BaseStorage:
    return cast(BaseStorage, _Patient(storage, seconds))
