"""Arrays of a .npz file, which is never unpickled."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.platform.data.own_files import readable
from narrowcast.platform.errors import UserError

_UNREADABLE = (
    OSError, ValueError, EOFError, LookupError, RuntimeError, MemoryError, OverflowError, zipfile.BadZipFile,
    zlib.error, struct.error,
)  # fmt: skip
"""Errors of NumPy and zipfile on damaged, encrypted or newer files, of which NotImplementedError is a RuntimeError."""


@contextmanager
def npz_arrays(path: Path, content: str) -> Iterator[Any]:
    """Open the arrays of a .npz file; raise `UserError` if it is none, is damaged, or an array of it is pickled.

    `content` is named by the advice: what to write with numpy.savez.
    """
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path}: is not a .npz file; write {content} with numpy.savez")
    with (
        readable(path, _UNREADABLE, "save it again with numpy.savez"),
        path.open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        yield arrays
