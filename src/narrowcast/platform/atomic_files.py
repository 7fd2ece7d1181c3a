"""Atomic and durable writes, and safetensors files with their metadata; reading never runs code."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from contextlib import suppress
from glob import escape
from itertools import count
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import safe_open

from narrowcast.platform.disk import disk, make_folders
from narrowcast.platform.interruption import uninterrupted

_ATTEMPTS = 3
_PART = re.compile(r"(\.(?P<host>[0-9a-f]{8})-(?P<pid>[0-9]{1,9})-[0-9]+)?\.part$")
_numbers = count()


def write_atomically(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace a file by new content, atomically and durably; raise `OSError` and leave nothing behind on failure.

    The file has the permissions `mode`, less the umask of the process, from its first byte on. Several processes may
    write one file: each writes a whole one under a name of its own, and the last to rename it wins.
    """
    make_folders(path.parent)
    own = f"{_host()}-{os.getpid()}"
    with uninterrupted():
        _remove_abandoned(path)
        for attempt in range(1, _ATTEMPTS + 1):
            part = path.with_name(f"{path.name}.{own}-{next(_numbers)}.part")
            try:
                disk().create(part, content, mode)
                replace_by(part, path)
            except OSError as error:
                with suppress(OSError):
                    disk().remove(part)
                if attempt < _ATTEMPTS and isinstance(error, FileNotFoundError) and path.parent.is_dir():
                    continue  # a process that shares this one's name, but not its processes, took it for abandoned
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
