"""Atomic and durable writes, and safetensors files with their metadata; reading never runs code."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import safe_open

from narrowcast.platform.disk import disk, make_folders
from narrowcast.platform.interruption import uninterrupted


def write_atomically(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace a file by new content, atomically and durably; raise `OSError` and leave nothing behind on failure.

    The file has the permissions `mode`, less the umask of the process, from its first byte on.
    """
    make_folders(path.parent)
    part = path.with_name(path.name + ".part")
    with uninterrupted():
        try:
            with suppress(FileNotFoundError):
                disk().remove(part)
            disk().create(part, content, mode)
            replace_by(part, path)
        except OSError:
            with suppress(OSError):
                disk().remove(part)
            raise


def replace_by(part: Path, path: Path) -> None:
    """Sync a file and rename it within its folder, durably."""
    disk().sync(part)
    disk().rename(part, path)
    disk().sync(path.parent)  # otherwise a power cut may undo the rename


def read_tensors(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file; raise `SafetensorError` if it is damaged."""
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
