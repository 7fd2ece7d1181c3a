"""The private folder of a local cluster, and a guard: Ray's processes and files do not outlive the run that began them.

After SIGKILL of a run, Ray 2.60 itself ends all but two agents within seconds, these after 60 to 90 s, and leaves the
folder. The guard is this file, run as a program with the standard library alone. It waits for the end of the process
that started it, whatever ends that, then kills what is left of the cluster and removes the folder. If the guard is
killed too, the next local cluster of this user does it: the folder of a live process has a lock, which the kernel
releases.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX, _LOCK = "nc-ray-", "in-use"
_MARK = "NARROWCAST_RAY_FOLDER"
"""Variable with the folder, by which the cluster's processes are told from others; they inherit it."""
_END_SECONDS = 20.0
_LONGEST_PARENT = 20  # of the 107 bytes of a socket's path, Ray and we need some 80


@contextmanager
def ray_folder() -> Iterator[Path]:
    """Yield a new folder that only this user can enter; at the end, no process started meanwhile and no file is left.

    Folders of this user whose processes were killed are removed first.
    """
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > _LONGEST_PARENT:
        parent = Path("/tmp")
    remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    held = _lock(folder)
    command, before = [sys.executable, "-I", __file__, str(folder)], os.environ.get(_MARK)
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as guard:
        os.environ[_MARK] = str(folder)
        try:
            yield folder
        finally:
            os.environ.pop(_MARK)
            if before is not None:
                os.environ[_MARK] = before
            assert guard.stdin is not None
            guard.stdin.close()
            try:
                guard.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                guard.kill()
            os.close(held)


def remove_abandoned(parent: Path) -> None:
    """Remove the folders in which no live process has a lock, and kill what is left of their clusters."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # of another user, or removed meanwhile
            if folder.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                clean_up(folder)
            finally:
                os.close(descriptor)


def clean_up(folder: Path) -> None:
    """Kill the processes of a folder's cluster, and remove the folder."""
    deadline = time.monotonic() + _END_SECONDS / 2
    while (left := _processes_of(folder)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path) -> int:
    """Return the descriptor of a lock that ends with this process; the file only becomes visible once it is locked."""
    part = folder / f"{_LOCK}.part"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    part.rename(folder / _LOCK)
    return descriptor


def _processes_of(folder: Path) -> list[int]:
    """Return the processes of this user that inherited the mark, and Ray's agents with a file of the folder open.

    The agents write their title over the end of their environment. The process that this one was started by is spared:
    a driver at its end.
    """
    mark, pids = f"{_MARK}={folder}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended, or of another user
            marked = mark in (process / "environ").read_bytes().split(b"\0")
            titled = not marked and (process / "cmdline").read_bytes().startswith(b"ray::")
            pid = int(process.name)
            if pid not in (os.getpid(), os.getppid()) and (marked or (titled and _has_open(process, folder))):
                pids.append(pid)
    return pids


def _has_open(process: Path, folder: Path) -> bool:
    for descriptor in (process / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if descriptor.readlink().is_relative_to(folder):
                return True
    return False


if __name__ == "__main__":
    sys.stdin.buffer.read()  # ends with the process that has the other end
    clean_up(Path(sys.argv[1]))
