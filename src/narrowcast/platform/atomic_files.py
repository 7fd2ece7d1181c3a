"""Atomic and durable writes, and safetensors files with their metadata; reading never runs code."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import safe_open

from narrowcast.platform.interruption import uninterrupted


def write_atomically(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace a file by new content, atomically and durably; raise `OSError` and leave nothing behind on failure.

    The file has the permissions `mode`, less the umask of the process, from its first byte on.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with uninterrupted():
        try:
            part.unlink(missing_ok=True)
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
                stream.write(content)
            replace_by(part, path)
        except OSError:
            with suppress(OSError):
                part.unlink()
            raise


def replace_by(part: Path, path: Path) -> None:
    """Sync a file and rename it within its folder, durably."""
    _sync(part)
    part.replace(path)
    _sync(path.parent)  # otherwise a power cut may undo the rename


def _sync(place: Path) -> None:
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_tensors(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file; raise `SafetensorError` if it is damaged."""
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
