"""Durable files: the operations by which every one is written, atomic writes, and safetensors and .npz files.

The operations are those of `Disk`, which a recording or simulated disk replaces. After a power cut, only what was
synced is certain: a file's content by `sync` of the file; its name, renaming and removal by `sync` of its folder. The
data that a record depends on are therefore synced before the record is written. Reading a file never runs code.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from glob import escape
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from narrowcast.platform.errors import RunFailed, UserError, remedy
from narrowcast.platform.storage.host import defer_signals


class Disk:
    """The file system of this machine. Operations raise `OSError`; a subclass may record, delay or fail them."""

    def create(self, path: Path, content: bytes, mode: int = 0o666) -> None:
        """Write a new file with the permissions `mode`, less the umask, from its first byte on."""
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
            stream.write(content)

    def write_with(self, path: Path, write: Callable[[Path], object]) -> None:
        """Write a file through a callback, new or replaced in place, without a copy of its content in memory."""
        write(path)

    def append(self, path: Path, content: bytes) -> None:
        """Write at the end of a file, which is created if it is missing."""
        with path.open("ab") as stream:
            stream.write(content)

    def truncate(self, path: Path, size: int) -> None:
        """Cut a file down to its first bytes."""
        os.truncate(path, size)

    def sync(self, path: Path) -> None:
        """Make the content of a file, or the entries of a folder, survive a power cut."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name in its folder, in place of the file that had it."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def make_folder(self, path: Path, mode: int = 0o777) -> None:
        """Create a folder in one that exists."""
        path.mkdir(mode)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()


_current: ContextVar[Disk] = ContextVar("disk", default=Disk())  # noqa: B039 - a Disk has no state


def disk() -> Disk:
    """Return the disk of this context; a thread has the machine's unless it is started in a copy of the context."""
    return _current.get()


@contextmanager
def use_disk(other: Disk) -> Iterator[None]:
    """Use `other` as the disk inside the block."""
    token = _current.set(other)
    try:
        yield
    finally:
        _current.reset(token)


GO_ON = "give the same command, which goes on"


@contextmanager
def writing(folder: Path, afterwards: str) -> Iterator[None]:
    """Raise `RunFailed` with the remedy, and what to do `afterwards`, if a file cannot be written in the block."""
    try:
        yield
    except OSError as error:
        raise RunFailed(f"cannot write to {folder} ({error}); {remedy(error)}, then {afterwards}") from error


def expand_home(path: str | Path) -> Path:
    """Return the path with the home folder in place of a leading ~; raise `UserError` for a user without one."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path}: this user has no home folder; set HOME, or give a path without ~") from error


def make_folders(path: Path, mode: int = 0o777) -> None:
    """Create a folder durably, with those above it that are missing; `mode` is that of the last one."""
    missing = takewhile(lambda folder: not folder.is_dir(), (path, *path.parents))
    for parent_folder in reversed(list(missing)):
        try:
            disk().make_folder(parent_folder, mode if parent_folder == path else 0o777)
        except FileExistsError:
            if not parent_folder.is_dir():
                raise
        disk().sync(parent_folder.parent)


def sync_all(paths: Iterable[Path]) -> None:
    """Sync files and then their folders, each once."""
    files = list(dict.fromkeys(paths))
    for path in (*files, *dict.fromkeys(file.parent for file in files)):
        disk().sync(path)


def remove_tree(folder: Path) -> None:
    """Remove a folder with everything in it."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            disk().remove(path)
    disk().remove_folder(folder)


_ATTEMPTS = 3
_PART = re.compile(r"(\.(?P<host>[0-9a-f]{8})-(?P<pid>[0-9]{1,9})-[0-9]+)?\.part$")
_numbers = count()


def write_atomically(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace a file by new content, atomically and durably; raise `OSError` of it and leave nothing behind on failure.

    The file has the permissions `mode`, less the umask of the process, from its first byte on. Several processes may
    write one file: each writes a whole one under a name of its own, and the last to rename it wins.
    """
    make_folders(path.parent)
    writer = f"{_host()}-{os.getpid()}"
    with defer_signals():
        _remove_abandoned(path)
        for attempt in range(1, _ATTEMPTS + 1):
            part = path.with_name(f"{path.name}.{writer}-{next(_numbers)}.part")
            try:
                disk().create(part, content, mode)
                replace_by(part, path)
            except OSError as error:
                with suppress(OSError):
                    disk().remove(part)
                if attempt < _ATTEMPTS and isinstance(error, FileNotFoundError) and path.parent.is_dir():
                    continue  # a process that shares this one's name, but not its processes, took it for abandoned
                if error.filename == str(part):
                    error.filename = str(path)
                    del error.filename2
                raise
            return


def without_part(name: str) -> str:
    """Return the name of the file that a name of `write_atomically` stands for, or the name itself if it is another."""
    return _PART.sub("", name)


def remove_parts(folder: Path) -> None:
    """Remove what writers that were killed left in a folder of which this process is the only writer."""
    for part in folder.glob("*.part"):
        with suppress(OSError):
            disk().remove(part)


def _remove_abandoned(path: Path) -> None:
    """Remove what processes of this machine that were killed left of their writes of a file."""
    for part in path.parent.glob(f"{escape(path.name)}.*.part"):
        writer = _PART.search(part.name)
        if writer and writer["host"] == _host() and _is_gone(int(writer["pid"])):
            with suppress(OSError):
                disk().remove(part)


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's
        return False
    return False


def _host() -> str:
    """Return a short name of this machine, or of this container."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def replace_by(part: Path, path: Path) -> None:
    """Sync a file and rename it within its folder, durably."""
    disk().sync(part)
    disk().rename(part, path)
    disk().sync(path.parent)  # otherwise a power cut may undo the rename


def read_tensors(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file; raise `SafetensorError` if it is damaged."""
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


@contextmanager
def readable(path: Path, errors: tuple[type[Exception], ...], advice: str) -> Iterator[None]:
    """Raise `UserError`, with the path and the advice, for one of the errors that a library has on damaged files."""
    try:
        yield
    except UserError:
        raise
    except errors as error:
        reason = (str(error).splitlines() or ["unreadable"])[0]
        raise UserError(f"{path}: {reason:.200}; {advice}") from error


_UNREADABLE_NPZ = (
    OSError, ValueError, EOFError, LookupError, RuntimeError, MemoryError, OverflowError, zipfile.BadZipFile,
    zlib.error, struct.error,
)  # fmt: skip
"""Errors of NumPy and zipfile on damaged, encrypted or newer files, of which NotImplementedError is a RuntimeError."""


@contextmanager
def npz_arrays(path: Path, content: str) -> Iterator[Any]:
    """Open the arrays of a .npz file; raise `UserError` if it is not one, is damaged, or an array of it is pickled.

    `content` is named by the advice: what to write with numpy.savez.
    """
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path}: is not a .npz file; write {content} with numpy.savez")
    with (
        readable(path, _UNREADABLE_NPZ, "save it again with numpy.savez"),
        path.open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        yield arrays
