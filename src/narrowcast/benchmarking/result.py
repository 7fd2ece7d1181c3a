"""The result of a benchmark: a row for each instance, its finished solves, and a summary by solver."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from narrowcast.benchmarking.file import BenchmarkFolder, Instance
from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking import units
from narrowcast.platform.tracking.metrics import declared_by, metric_label, relation
from narrowcast.runs.finished_run import TextTable
from narrowcast.runs.folder import RESULT
from narrowcast.runs.result import SolveFile, SolveResult

if TYPE_CHECKING:
    from pandas import DataFrame

    from narrowcast.runs.comparison import SolveComparison


_WORDS = ("instance", "problem", "solver", "seed", "state", "reason")


@dataclass(frozen=True, repr=False)
class BenchmarkResult:
    """The instances of a benchmark: `rows` has state, metrics, iterations and times of each."""

    folder: Path
    rows: Sequence[Mapping[str, Any]]

    @property
    def table(self) -> DataFrame:
        """One row per instance, as `instances.csv` has them."""
        from pandas import DataFrame

        return DataFrame(list(self.rows))

    @property
    def solves(self) -> list[SolveResult]:
        """The finished solves."""
        return [SolveResult.load(self.folder / row["instance"]) for row in self._in("finished")]

    @property
    def comparison(self) -> SolveComparison:
        """The finished solves, compared."""
        from narrowcast.runs.comparison import SolveComparison

        return SolveComparison(tuple(self.solves))

    def failures(self) -> dict[str, str]:
        """Return why instances failed, by name."""
        return {row["instance"]: row["reason"] for row in self._in("failed")}

    def summary(self) -> TextTable:
        """Return a row per solver: how many of its instances ended how, and how many reached each target."""
        targets = list(dict.fromkeys(name for row in self.rows for name in row if name.startswith("reached/")))
        heads = ["solver", "finished", "failed", "skipped", "waiting", *(target.split("/", 1)[1] for target in targets)]
        lines = []
        for solver in dict.fromkeys(row["solver"] for row in self.rows):
            of_solver = [row for row in self.rows if row["solver"] == solver]
            states = Counter(row["state"] for row in of_solver)
            seconds = [row["solver_seconds"] for row in of_solver if row["state"] == "finished"]
            with_target = {target: [row[target] for row in of_solver if target in row] for target in targets}
            reached = (f"{sum(values)} of {len(values)}" for values in with_target.values())
            shown = units.format_short_seconds(median(seconds)) if seconds else units.NOT_KNOWN
            counts = (str(states[state]) for state in ("finished", "failed", "skipped", "waiting"))
            lines.append([solver, *counts, *reached, shown])
        return TextTable([*heads, "median time of\nthe solver"], lines)

    def __repr__(self) -> str:
        states = Counter(row["state"] for row in self.rows)
        counted = ", ".join(f"{count} {state}" for state, count in states.items())
        return f"{self.folder.name}: instances {counted}, in {self.folder}"

    def _in(self, state: str) -> list[Mapping[str, Any]]:
        return [row for row in self.rows if row["state"] == state]


def result_of(folder: BenchmarkFolder, instances: Iterable[Instance]) -> BenchmarkResult:
    """Return the result so far; an instance that has not ended is `waiting`."""
    states = folder.states()
    return BenchmarkResult(
        folder.path,
        [_row(folder.path / instance.name, instance, states.get(instance.name, {})) for instance in instances],
    )


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as CSV, with the columns of any of them."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text := io.StringIO(newline=""), columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(run: Path, instance: Instance, entry: Mapping[str, str]) -> dict[str, Any]:
    state, reason = entry.get("state", "waiting").replace("begun", "waiting"), entry.get("reason", "")
    file: SolveFile | None = None
    if state == "finished" and not (run / RESULT).is_file():  # its folder was removed, so it is left to do
        state = "waiting"
    elif state == "finished":
        try:
            file = SolveFile.read(run)
        except UserError as error:
            state, reason = "failed", str(error)
    names = (instance.name, instance.problem, instance.solver, instance.solve.seed, state, reason)
    row: dict[str, Any] = dict(zip(_WORDS, names, strict=True))
    targets = _targets(instance)
    if file is None:
        return {**row, **{f"reached/{label}": False for label in targets.values()}}
    seconds = {targets[target.metric, target.value]: target.solver_seconds_to for target in file.targets}
    return {
        **row,
        "stopped_by": file.stopped_by,
        "iterations": file.iterations,
        "residual": file.residual,
        **file.final,
        "solver_seconds": file.solver_seconds,
        "wall_seconds": file.wall_seconds,
        **{f"reached/{label}": value is not None for label, value in seconds.items()},
        **{f"solver_seconds_to/{label}": value for label, value in seconds.items()},
        **{f"best/{name}": best.value for name, best in file.best.items()},
        "answer_sha256": file.answer_sha256,
        "mlflow_run_id": file.mlflow_run_id,
    }


def _targets(instance: Instance) -> dict[tuple[str, float], str]:
    """Return the labels of an instance's targets, such as `test RMSE <= 0.95`."""
    declared = declared_by(instance.solve.problem)
    return {
        (metric, value): f"{metric_label(metric)} {relation(metric, declared)} {value:g}"
        for metric, values in instance.solve.targets.items()
        for value in values
    }
