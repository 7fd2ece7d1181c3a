"""The SQLite file of a tracking store: there with all its tables, or not at all.

MLflow creates its tables in many steps, and cannot open a file in which a killed process has left some of them. These
steps take seconds, so an empty store is kept in the user's cache for each version of MLflow, and copied.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from sqlalchemy import create_engine, make_url

from narrowcast.platform.atomic_files import replace_by, write_atomically
from narrowcast.platform.disk import Disk, disk, make_folders, using

_DIGEST_BYTES = 32


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
        kept = _kept()
        if kept:
            disk().create(part, kept)
        else:
            disk().fill(part, _with_tables)
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
    with suppress(OSError), using(Disk()):
        make_folders(path.parent)
        with _locked(path.parent):
            write_atomically(path, hashlib.sha256(store).digest() + store)


def _with_tables(path: Path) -> None:
    from narrowcast.platform.tracking.mlflow_internals import create_tables

    engine = create_engine(f"sqlite:///{path}")
    try:
        create_tables(engine)
    finally:
        engine.dispose()
