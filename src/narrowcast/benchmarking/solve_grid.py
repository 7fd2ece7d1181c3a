"""Solves as a benchmark: which solver ran on which problem, and what each took to an error.

A problem is one instance: equal settings with another seed make another one. Reading executes no code, and a run
without a result, such as one whose solver diverged, counts with what its journal has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from narrowcast.platform.config.files import suggest
from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.journal import Journal
from narrowcast.platform.tracking import units
from narrowcast.platform.tracking.metrics import ITERATIONS, SOLVER_TIME, LowerIsBetter, curve, lower_is_better
from narrowcast.platform.types import ITERATION_COLUMNS, FloatArray
from narrowcast.runs.folder import CONFIG, RESULT, differing_settings, settings_of
from narrowcast.runs.result import SolveResult

Settings = Mapping[str, Any]
_INSTANCE = re.compile(r"(.+)\.([^.]+)\.seed-\d+")
"""Folders of `narrowcast benchmark`: the names of the problem and of the solver in its file, and the seed."""
LIMITS = ("iterations", "solver_seconds", "tolerance")
"""The settings that end a solve."""
_ENDED = {
    "solver_seconds": "out of time",
    "iterations": "out of iterations",
    "tolerance": "residual within tolerance",
}


@dataclass(frozen=True)
class GridRun:
    """A solve of a benchmark; `result` is None for one that failed, was stopped or is running.

    `failure` is what the folder of its benchmark says of it, if it has one.
    """

    folder: Path
    settings: Settings
    history: pa.Table
    result: SolveResult | None
    failure: str = ""

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.folder.name

    @property
    def declared(self) -> LowerIsBetter:
        """The metrics that the problem declares as better when lower."""
        return self.result.file.lower_is_better if self.result else None

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.settings.get("seed") or 0)

    @property
    def ended(self) -> str:
        """The reason why the run ended, in a few words."""
        if self.result is None:
            return "failed" if self.failure else "no result"
        return _ENDED.get(self.result.file.stopped_by, self.result.file.stopped_by)

    @property
    def limits(self) -> dict[str, Any]:
        """The limits of the run that are set."""
        return {name: self.settings[name] for name in LIMITS if self.settings.get(name) is not None}

    def part(self, name: str) -> dict[str, Any]:
        """Return the settings of the problem or of the solver, without their first word."""
        return {path.partition(".")[2]: value for path, value in self.settings.items() if path.startswith(f"{name}.")}

    @cached_property
    def metrics(self) -> list[str]:
        """The errors that were measured, those on test data first."""
        names = [name for name in self.history.column_names if name not in ITERATION_COLUMNS]
        return sorted((name for name in names if lower_is_better(name, self.declared)), key=_is_no_test)

    def errors(self, metric: str) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return iterations, time of the solver in seconds, and the metric, wherever that was measured."""
        iterations, errors = curve(self.history, ITERATIONS, metric)
        return iterations, curve(self.history, SOLVER_TIME, metric)[0], errors

    def cost(self, metric: str, goal: float) -> tuple[float, int] | None:
        """Return time and iterations until the metric was first measured at the goal or below, None if it was not."""
        iterations, seconds, errors = self.errors(metric)
        reached = np.flatnonzero(errors <= goal)
        return (float(seconds[reached[0]]), int(iterations[reached[0]])) if len(reached) else None

    def why(self, metric: str) -> str:
        """Return how the run ended, its residual and its least error."""
        iterations, seconds, errors = self.errors(metric)
        parts = [self.ended]
        if self.result is not None:
            file = self.result.file
            parts.append(f"{file.iterations} iterations in {units.format_short_seconds(file.solver_seconds)}")
            parts.append(f"residual {file.residual:.2g}")
        elif self.failure:
            parts[0] += f": {self.failure}"
        elif len(iterations):
            parts[0] += f" after iteration {iterations[-1]:.0f}, {units.format_short_seconds(seconds[-1])}"
        return ", ".join([*parts, f"least error {errors.min():.2g}" if len(errors) else "no error measured"])


@dataclass(frozen=True)
class GridProblem:
    """A problem and the runs on it by the label of their solver; `attributes` is what it can be filtered by."""

    label: str
    metric: str
    attributes: Mapping[str, Any]
    runs: Mapping[str, GridRun]

    @cached_property
    def least(self) -> float:
        """The least error of any run, infinite if none was measured."""
        return min((float(errors.min(initial=np.inf)) for errors in self._errors()), default=np.inf)

    def _errors(self) -> Iterable[FloatArray]:
        return (run.errors(self.metric)[2] for run in self.runs.values())


@dataclass(frozen=True)
class SolveGrid:
    """Solves by problem and solver."""

    problems: tuple[GridProblem, ...]
    solvers: tuple[str, ...]

    @cached_property
    def runs(self) -> list[GridRun]:
        """All runs, problem by problem."""
        return [run for problem in self.problems for run in problem.runs.values()]


def read_grid(folders: Iterable[Path], metrics: Sequence[str] = ()) -> SolveGrid:
    """Return the solves in these folders as a benchmark.

    Args:
        folders: folders of runs.
        metrics: errors to go by, of which each problem has the first that it measures; by default its first error on
            test data.

    Raises:
        UserError: no solve, two runs of one solver on one problem, or a metric that is none of the problem's errors.

    """
    runs = [_read(folder) for folder in folders]
    if not runs:
        raise UserError("no solves to compare; give the folder of at least one, or their folder with --output")
    solvers = _labels([run.part("solver") for run in runs])
    problems = _labels([run.part("problem") for run in runs])
    for index, run in enumerate(runs):  # in a benchmark a solver may have settings of its own for a problem
        if (named := _INSTANCE.fullmatch(run.name)) is not None:
            problems[index], solvers[index] = named.groups()
    if len({run.seed for run in runs}) > 1:
        problems = [f"{label} seed={run.seed}" for label, run in zip(problems, runs, strict=True)]
    by_problem: dict[str, dict[str, GridRun]] = {}
    for problem, solver, run in zip(problems, solvers, runs, strict=True):
        other = by_problem.setdefault(problem, {}).setdefault(solver, run)
        if other is not run:
            raise UserError(
                f"{other.folder} and {run.folder} are {solver} on {problem} with one seed; give one of them"
            )
    grid = [
        GridProblem(label, _metric(label, of_problem, metrics), _attributes(of_problem), of_problem)
        for label, of_problem in by_problem.items()
    ]
    return SolveGrid(tuple(sorted(grid, key=_order)), tuple(sorted(set(solvers))))


def solve_folders(output: Path) -> list[Path]:
    """Return the folders of the solves in a folder of runs; those of experiments are left out."""
    configs = sorted(output.glob(f"*/{CONFIG}"))
    return [config.parent for config in configs if "solver.kind" in settings_of(config.parent)]


def _read(folder: Path) -> GridRun:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the folder of a solve")
    settings = settings_of(folder)
    if "solver.kind" not in settings or "problem.kind" not in settings:
        raise UserError(f"{folder}: not the folder of a solve, which a site compares; omit it")
    if (folder / RESULT).is_file():
        result = SolveResult.load(folder)
        return GridRun(folder, settings, result.history, result)
    from narrowcast.benchmarking.file import BenchmarkFolder  # imports all solvers

    failure = BenchmarkFolder(folder.parent).states().get(folder.name, {}).get("reason", "")
    return GridRun(folder, settings, Journal.read(folder).rounds_table(), None, failure)


def _labels(parts: Sequence[Settings]) -> list[str]:
    """Return the kind of each of these settings and those in which it differs from others of its kind.

    A section that others lack is named without its settings, unless they differ too.
    """
    by_kind: dict[str, list[Settings]] = {}
    for settings in parts:
        by_kind.setdefault(str(settings["kind"]), []).append(settings)
    differing = {kind: differing_settings(of_kind) for kind, of_kind in by_kind.items()}

    def label(of_part: Settings) -> str:
        kind, words = str(of_part["kind"]), [str(of_part["kind"])]
        for path in differing[kind]:
            if (value := of_part.get(path)) is None or value is False:
                continue
            section = path.partition(".")[0]
            values = {str(settings[path]) for settings in by_kind[kind] if path in settings}
            shown = f"{value:g}" if isinstance(value, float) else value
            words.append(section if section != path and len(values) == 1 else f"{path}={shown}")
        return " ".join(dict.fromkeys(words))

    return [label(settings) for settings in parts]


def _metric(label: str, runs: Mapping[str, GridRun], wanted: Sequence[str]) -> str:
    measured = list(dict.fromkeys(name for run in runs.values() for name in run.metrics))
    chosen = next((name for name in wanted or measured if name in measured), None)
    if not any(run.history.num_rows for run in runs.values()):
        return next(iter(wanted), "residual")  # no run got so far
    if chosen is None:
        known = f"its errors: {', '.join(measured)}" if measured else "it measures no error"
        raise UserError(
            f"no run on {label} has the error {' or '.join(wanted) or 'of any kind'}; {known}"
            f"{suggest(wanted[0], measured) if wanted else ''}"
        )
    return chosen


def _attributes(runs: Mapping[str, GridRun]) -> dict[str, Any]:
    """Return the problem's sizes and its scalar settings; of a matrix to complete the oversampling too."""
    first, *_ = runs.values()
    sizes: Settings = next((run.result.file.sizes for run in runs.values() if run.result), {})
    settings = {path: value for path, value in first.part("problem").items() if isinstance(value, int | float | str)}
    attributes = {
        "kind": settings.pop("kind"),
        **sizes,
        **{name: settings[name] for name in settings if name not in sizes},
    }
    if {"rows", "columns", "observed", "rank"} <= {*sizes}:
        freedom = sizes["rank"] * (sizes["rows"] + sizes["columns"] - sizes["rank"])
        attributes["entries per degree of freedom"] = round(sizes["observed"] / freedom, 2)
    return {**attributes, "seed": first.seed}


def _order(problem: GridProblem) -> list[tuple[str, float]]:
    values = problem.attributes.values()
    return [(value, 0.0) if isinstance(value, str) else ("", float(value)) for value in values]


def _is_no_test(name: str) -> bool:
    return not name.startswith("test.")
