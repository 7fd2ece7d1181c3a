"""The operations by which every durable file is written, behind one seam that a recording or simulated disk replaces.

After a power cut, only what was synced is certain: a file's content by `sync` of the file; its name, renaming and
removal by `sync` of its folder. What a record rests on is therefore synced before the record is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import takewhile
from pathlib import Path

from narrowcast.platform.errors import RunFailed, UserError, remedy


class Disk:
    """The file system of this machine. Operations raise `OSError`; a subclass may record, delay or fail them."""

    def create(self, path: Path, content: bytes, mode: int = 0o666) -> None:
        """Write a new file with the permissions `mode`, less the umask, from its first byte on."""
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
            stream.write(content)

    def fill(self, path: Path, write: Callable[[Path], object]) -> None:
        """Let a library write a file, new or replaced in place, without a copy of its content in memory."""
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
def using(other: Disk) -> Iterator[None]:
    """Write to another disk within the block."""
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
    missing = takewhile(lambda each: not each.is_dir(), (path, *path.parents))
    for each in reversed(list(missing)):
        try:
            disk().make_folder(each, mode if each == path else 0o777)
        except FileExistsError:
            if not each.is_dir():
                raise
        disk().sync(each.parent)


def sync_all(paths: Iterable[Path]) -> None:
    """Sync files and then their folders, each once."""
    files = list(dict.fromkeys(paths))
    for each in (*files, *dict.fromkeys(file.parent for file in files)):
        disk().sync(each)


def remove_tree(folder: Path) -> None:
    """Remove a folder with everything in it."""
    for each in folder.iterdir():
        if each.is_dir() and not each.is_symlink():
            remove_tree(each)
        else:
            disk().remove(each)
    disk().remove_folder(folder)
