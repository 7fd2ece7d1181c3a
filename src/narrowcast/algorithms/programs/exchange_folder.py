"""The files through which a program solves a problem: arrays as CSV, each in a folder of its own."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from narrowcast.platform.errors import RunFailed
from narrowcast.platform.types import Arrays, FloatArray


def write_arrays(arrays: Mapping[str, Any], folder: Path) -> None:
    """Write arrays [m, k] as NAME.csv, m lines of k numbers each with 17 digits, which give the same float64 again.

    An array of one dimension is a column, a single number a file of one number.
    """
    folder.mkdir(parents=True)
    for name, values in arrays.items():
        table = np.asarray(values)
        table = table.reshape(len(table), -1) if table.ndim else table.reshape(1, 1)
        np.savetxt(folder / f"{name}.csv", table, delimiter=",", fmt="%d" if table.dtype.kind in "biu" else "%.17g")


def read_arrays(folder: Path, program: str) -> dict[str, FloatArray]:
    """Return the arrays [m, k] in a folder by name; raise `RunFailed` for a file that is no table of finite numbers."""
    found = {}
    for path in sorted(folder.glob("*.csv")):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of an empty file, which is refused below
                found[path.stem] = np.loadtxt(path, delimiter=",", ndmin=2)
        except (ValueError, OSError) as error:
            first = str(error).splitlines()[0]
            raise RunFailed(f"{program} wrote {path.name}, which is no table of numbers ({first})") from error
        if not found[path.stem].size or not np.isfinite(found[path.stem]).all():
            what = "a value that is no finite number" if found[path.stem].size else "no number"
            raise RunFailed(f"{program} wrote {path.name}, which has {what}")
    return found


def folder_of(problem: Any) -> Path:
    """Return a folder of this process with the problem's files, kept until those of another problem are written."""
    scratch = Path(_scratch(os.getpid()).name)
    folder = scratch / str(problem.digest)[:32]
    if not folder.is_dir():
        for other in scratch.iterdir():
            shutil.rmtree(other)
        arrays: Arrays = problem.exported()
        unfinished = folder.with_suffix(".part")
        write_arrays(arrays, unfinished)
        unfinished.rename(folder)
    return folder


@lru_cache(maxsize=1)
def _scratch(process: int) -> TemporaryDirectory[str]:
    """Return the folder of this process, removed at its end; `process` gives a forked process its own."""
    del process
    return TemporaryDirectory(prefix="narrowcast-problem-")
