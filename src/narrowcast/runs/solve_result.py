"""A finished solve, read from its folder: metrics, times, iterations, figures and the answer.

Reading executes no code: the table is Parquet, the answer is safetensors. `load_any` reads a finished run of either
kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from narrowcast.platform.config.files import validate_result
from narrowcast.platform.config.trust import read_json
from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking import metrics, units
from narrowcast.platform.tracking.metrics import SolveTargetCost, format_metric, metric_label
from narrowcast.platform.types import ITERATION, Arrays
from narrowcast.runs.finished_run import FinishedRun, ModelFormat, RunFile, write_arrays
from narrowcast.runs.folder import ANSWER, ITERATIONS, RESULT, finish_advice, read_arrays, read_table, saved_config
from narrowcast.runs.result import Result, ResultFile, load_result, read_result

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from narrowcast.solve_run import Solve


class BestOfSolve(BaseModel):
    """The best value of a metric and the first iteration that had it."""

    model_config = ConfigDict(frozen=True)

    value: float
    iteration: int


class SolveFile(RunFile):
    """The content of a solve's `result.json`.

    `stopped_by` is `tolerance`, `iterations`, `solver_seconds`, or what the solver said of itself.
    """

    solver: str
    problem: str
    sizes: Mapping[str, int]
    problem_sha256: str
    stopped_by: str
    iterations: int
    residual: float
    best: Mapping[str, BestOfSolve]
    targets: tuple[SolveTargetCost, ...] = ()
    solver_seconds: float
    answer_sha256: str


class SolveResult(FinishedRun[SolveFile]):
    """A finished solve."""

    main_figure = "error_time"

    @property
    def heading(self) -> str:
        """The solve in a few words."""
        return f"{self.file.solver} on {self.file.problem}, {self.file.iterations} iterations"

    @property
    def solver_seconds(self) -> float:
        """The time of the solver: its first state and its iterations, without measurements and records."""
        return self.file.solver_seconds

    @cached_property
    def iterations(self) -> DataFrame:
        """One row per recorded iteration: residual, time of the solver, and the metrics measured (NaN elsewhere)."""
        return self.history.to_pandas()

    @cached_property
    def config(self) -> Solve:
        """The solve, as `config.yaml` has it."""
        from narrowcast.solve_run import load_solve

        return load_solve(saved_config(self.folder))

    def answer(self) -> Arrays:
        """Return the answer's arrays by name."""
        return read_arrays(self.folder, ANSWER, "solve the problem again")

    def export(self, path: str | Path, model_format: ModelFormat = "safetensors") -> Path:
        """Write the answer to a file, as safetensors or as tensors by name for `torch.load`, and return its path."""
        return write_arrays(self.answer(), path, model_format)

    def figures(self) -> dict[str, Figure]:
        """Return the figures by name: error_iteration and error_time."""
        from narrowcast.platform.tracking.figures import solve_figures  # imports Matplotlib

        return solve_figures(self.history, f"{self.name}: {self.file.solver} on {self.file.problem}")

    @property
    def targets(self) -> tuple[SolveTargetCost, ...]:
        """The cost of each of the solve's `targets`."""
        return self.file.targets

    def summary(self) -> list[tuple[str, str]]:
        """Return the summary as pairs of a label and a formatted value."""
        file, shares = self.file, self.file.shares
        rows = [(metric_label(name), format_metric(name, value, shares)) for name, value in file.final.items()]
        rows += self.baseline_rows()
        rows += [(file.goal(target), _cost(target)) for target in file.targets]
        return [
            *rows,
            ("residual", f"{file.residual:.4g}"),
            ("iterations", f"{file.iterations} (ended by {file.stopped_by})"),
            ("time of the solver", units.format_short_seconds(file.solver_seconds)),
            ("wall time", units.format_short_seconds(file.wall_seconds)),
            ("problem", ", ".join(f"{value:,} {name}" for name, value in file.sizes.items())),
            ("seed", str(file.seed)),
            ("answer sha256", file.answer_sha256[:12]),
        ]

    def provenance(self) -> list[tuple[str, str]]:
        """Return seed, answer, problem, commit and MLflow run, as pairs of a label and a value."""
        known = [
            ("seed", str(self.seed)),
            ("answer sha256", self.file.answer_sha256),
            ("problem sha256", self.file.problem_sha256),
            ("git commit", self.file.git_commit),
            ("MLflow run", self.mlflow_run_id),
        ]
        return [(label, value) for label, value in known if value]


def _cost(target: SolveTargetCost) -> str:
    if target.iterations_to is None or target.solver_seconds_to is None:
        return "not reached"
    return f"after {target.iterations_to} iterations, {units.format_short_seconds(target.solver_seconds_to)}"


def is_solve_folder(folder: Path) -> bool:
    """Return whether the folder is that of a finished solve."""
    return (folder / ITERATIONS).is_file() and (folder / RESULT).is_file()


def read_solve_file(path: Path) -> SolveFile:
    """Read the `result.json` of a solve; raise `UserError` if it is damaged."""
    return validate_result(SolveFile, read_json(path, finish_advice(path.parent)), str(path))


def load_solve_result(folder: Path) -> SolveResult:
    """Read a finished solve; raise `UserError` that says what is wrong with its folder."""
    file = read_solve_file(folder / RESULT)
    history = read_table(folder / ITERATIONS, (ITERATION, "residual", "solver_seconds"))
    last = int(metrics.column(history, ITERATION).max(initial=0))
    if last != file.iterations:
        raise UserError(
            f"{folder}: {ITERATIONS} ends at iteration {last} and {RESULT} at iteration {file.iterations}, so it is "
            f"no finished solve; {finish_advice(folder)}"
        )
    return SolveResult(folder, file, history)


def load_any(folder: Path) -> Result | SolveResult:
    """Return the result in a run's folder; raise `UserError` if there is none."""
    return load_solve_result(folder) if is_solve_folder(folder) else load_result(folder)


def read_any_file(folder: Path) -> ResultFile | SolveFile:
    """Return the content of `result.json` alone; raise `UserError` if it is damaged."""
    return read_solve_file(folder / RESULT) if is_solve_folder(folder) else read_result(folder / RESULT)
