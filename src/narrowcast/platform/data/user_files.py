"""Files that a user names: where they are looked for, and arrays of .npz files.

Lookup of the files and folders that a user names in an experiment.

Arrays of a .npz file, which is never unpickled.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.platform.data.download import roots
from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.disk import expand_home


def located(path: Path, field: str, section: str = "data") -> Path:
    """Return the file or folder at `path`: as given, or below the folders searched for data sets.

    Raise `UserError` with the folders searched if there is none.
    """
    path = expand_home(path)
    candidates = [path, *(root / path for root in roots())]
    existing = next((candidate for candidate in candidates if candidate.exists()), None)
    if existing is None:
        searched = ", ".join(dict.fromkeys(str(candidate.absolute()) for candidate in candidates))
        raise UserError(f"{section}.{field} = {path} does not exist (looked for {searched}); give the path of the data")
    return existing


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
