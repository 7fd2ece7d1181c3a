"""Reading a finished run of any kind, an experiment or a solve."""

from __future__ import annotations

from pathlib import Path

from narrowcast.runs.result import Result, load_result
from narrowcast.runs.result_file import ResultFile, read_result
from narrowcast.runs.run_folder import RESULT
from narrowcast.runs.solve_result import (
    SolveFile,
    SolveResult,
    is_solve_folder,
    load_solve_result,
    read_solve_file,
)


def load_any(folder: Path) -> Result | SolveResult:
    """Return the result in a run's folder; raise `UserError` if there is none."""
    return load_solve_result(folder) if is_solve_folder(folder) else load_result(folder)


def read_any_file(folder: Path) -> ResultFile | SolveFile:
    """Return the content of `result.json` alone; raise `UserError` if it is damaged."""
    return read_solve_file(folder / RESULT) if is_solve_folder(folder) else read_result(folder / RESULT)
