"""The SQLite file of a tracking store: there with all its tables, or not at all.

MLflow creates its tables in many steps, and cannot open a file in which a killed process has left some of them.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sqlalchemy import create_engine, make_url

from narrowcast.platform.atomic_files import replace_by
from narrowcast.platform.disk import disk, make_folders
from narrowcast.platform.tracking.mlflow_internals import create_tables


def make_sqlite_file(uri: str) -> None:
    """Create the file that a URI names, unless it is there; raise `OSError` or a `SQLAlchemyError`."""
    path = Path(make_url(uri).database or "")
    make_folders(path.parent)
    if _is_made(path):
        return
    with _locked(path.parent):
        if _is_made(path):  # by another process, just now
            return
        part = path.with_name(path.name + ".part")
        for rest in (part, part.with_name(part.name + "-journal")):
            with suppress(FileNotFoundError):
                disk().remove(rest)
        disk().fill(part, _with_tables)
        replace_by(part, path)


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


def _with_tables(path: Path) -> None:
    engine = create_engine(f"sqlite:///{path}")
    try:
        create_tables(engine)
    finally:
        engine.dispose()
