"""Reading a finished run of any kind, an experiment or a solve."""

from __future__ import annotations

from pathlib import Path

from narrowcast.runs.result import Result, load_result
from narrowcast.runs.solve_result import SolveResult, is_solve_folder, load_solve_result


def load_any(folder: Path) -> Result | SolveResult:
    """Return the result in a run's folder; raise `UserError` if there is none."""
    return load_solve_result(folder) if is_solve_folder(folder) else load_result(folder)
