"""Files that are there wholly or not at all, and safetensors with what stands in their header; no code is ever run."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import safe_open

from narrowcast.platform.interruption import uninterrupted


def write_atomically(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace a file by new content, wholly or not at all, and lasting; nothing is left where that fails.

    `mode`: who may do what with it, less the process's umask, from its first byte on.
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
    """Give a file that is written another one's name in the same folder, for good."""
    _sync(part)
    part.replace(path)
    _sync(path.parent)  # else a power cut may take the new name back


def _sync(place: Path) -> None:
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_tensors(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """The tensors and the metadata of a safetensors file, held once; raises `SafetensorError` where it is none."""
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
