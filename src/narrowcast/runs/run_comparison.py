"""The common part of comparisons of finished runs of one kind."""

from __future__ import annotations

import io
import logging
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
from rich.console import Console

from narrowcast.platform.config import suggest
from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking import units
from narrowcast.runs.finished_run import FinishedRun
from narrowcast.runs.run_settings import settings_of
from narrowcast.runs.terminal_output import PlainConsole
from narrowcast.runs.text_table import Column, TextTable, table_of, with_spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

logger = logging.getLogger(__name__)
RunT = TypeVar("RunT", bound=FinishedRun[Any])


@dataclass(frozen=True)
class RunComparison(ABC, Generic[RunT]):
    """Finished runs of one kind, in the order given."""

    runs: tuple[RunT, ...]
    columns: tuple[str, ...] | None = None
    """The columns of the results, by the names of `results_columns`; None for the usual ones."""

    digest_column: ClassVar[str]
    """The column of `table` with the sha256 of each run's result."""
    section: ClassVar[str]
    """The section of the settings that says what the runs are about, `data` or `problem`."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise UserError("no runs to compare; give at least one finished run")
        for folder, times in Counter(run.folder.resolve() for run in self.runs).items():
            if times > 1:
                logger.warning("%s is given %d times: these rows are one run", folder.name, times)
        for first, other in self._with_other_data():
            logger.warning("%s and %s ran on different data: the files of one name have other content", first, other)

    def labels(self) -> list[str]:
        """Return the runs' names, with the folder if two runs share a name."""
        names = [run.name for run in self.runs]
        return [
            name if names.count(name) == 1 else f"{name} ({run.folder})"
            for name, run in zip(names, self.runs, strict=True)
        ]

    @cached_property
    def settings(self) -> list[dict[str, Any]]:
        """The settings of each run by dotted path, but its name, tracking and backend."""
        return [settings_of(run.folder) for run in self.runs]

    def _with_other_data(self) -> Iterator[tuple[str, str]]:
        """Yield the labels of two runs whose data have the same settings and name, but another sha256."""
        section, firsts = self.section, dict[Any, tuple[str, str]]()
        for label, settings, run in zip(self.labels(), self.settings, self.runs, strict=True):
            sha256 = getattr(run.file, f"{section}_sha256")
            its = {path: str(value) for path, value in settings.items() if path.startswith(f"{section}.")}
            its["path"] = Path(its.pop(f"{section}.path", "")).name
            if sha256 and settings:
                first, its_sha256 = firsts.setdefault((run.file.seed, *sorted(its.items())), (label, sha256))
                if its_sha256 != sha256:
                    yield first, label

    @property
    @abstractmethod
    def table(self) -> DataFrame:
        """One row per run."""

    @abstractmethod
    def results_columns(self) -> Mapping[str, Column]:
        """Return the columns that the table of results may have, by name, and their formatted cells."""

    @abstractmethod
    def text_tables(self) -> dict[str, TextTable]:
        """Return all tables by title, formatted; that of results is `Results`."""

    def results_table(self, without: Collection[str] = ()) -> TextTable:
        """Return the table of results, formatted: a row per run, or group of runs, and the chosen columns."""
        known = self.results_columns()
        names = self.columns or [name for name, each in known.items() if each.usual and name not in without]
        for name in names:
            if name not in known:
                usual = ", ".join(name for name, each in known.items() if each.usual)
                raise UserError(
                    f'no column "{name}"; usual ones are {usual}; others are metrics and settings by dotted path'
                    f"{suggest(name, known)}"
                )
        baselines = self._baseline_rows()
        columns = {"run": Column("run", self.row_labels(), word=True), **{name: known[name] for name in names}}
        return table_of(
            [
                replace(column, cells=[*column.cells, *(row.get(name, units.NOT_KNOWN) for row in baselines)])
                for name, column in columns.items()
            ],
            self.caption,
        )

    def _baseline_rows(self) -> list[dict[str, str]]:
        """Return a row for each baseline on each data set, its cells by column; several data seeds are averaged."""
        found: dict[tuple[str, str], dict[Any, RunT]] = {}
        for run in self.runs:
            for name, metrics in run.baselines.items():
                found.setdefault((name, getattr(run.file, self.section)), {}).setdefault(tuple(metrics.items()), run)
        rows = []
        for (name, on), each in found.items():
            row = {"run": name, "algorithm": "baseline", "solver": "baseline", self.section: on}
            runs = list(each.values())
            for metric in runs[0].baselines[name]:
                values = [run.baselines[name].get(metric, np.nan) for run in runs]
                spread = float(np.std(values, ddof=1)) if len(values) > 1 else np.nan
                row[metric] = with_spread(metric, float(np.mean(values)), spread, runs[0].file.shares)
            rows.append(row)
        return rows

    @property
    def caption(self) -> str:
        """The caption of the table of results."""
        return ""

    @property
    def chosen_table(self) -> DataFrame:
        """`table` with the chosen columns, and settings that all runs share if they are among them."""
        if self.columns is None:
            return self.table
        self.results_table()  # refuses unknown columns
        table = self.table.copy()
        for name in self.columns:
            if name not in table:
                table[name] = [each.get(name) for each in self.settings]
        return table[[name for name in self.columns if name != "seeds"]]

    @abstractmethod
    def figure(self, axes: Sequence[str] | None = None, metric: str | None = None) -> Figure:
        """Return a metric of the runs against their costs."""

    def row_labels(self) -> list[str]:
        """Return the labels of the rows of `results_table`."""
        return self.labels()

    def clients_figure(self, path: str | Path | None = None, *, metric: str | None = None) -> Figure | None:
        """Return the distribution of a metric over clients, None for runs without such metrics."""
        del path, metric
        return None

    def latex(self) -> str:
        """Return the table of results as a LaTeX tabular for the package booktabs.

        Wall time, which says nothing of a method, is left out unless it is among `columns`.
        """
        return self.results_table(without=("wall_seconds",)).latex()

    def plot(
        self, path: str | Path | None = None, *, axes: Sequence[str] | None = None, metric: str | None = None
    ) -> Figure:
        """Return `figure()`, written to a file too if a path is given, in the format that its suffix names."""
        return saved_figure(self.figure(axes, metric), path)

    def report(self, path: str | Path) -> Path:
        """Write the comparison with its figure and the runs' configurations to one HTML file; return its path."""
        from narrowcast.runs.html_report import comparison_report, write_report

        return write_report(comparison_report(self), path)

    def __str__(self) -> str:
        """Return the tables, as wide as the terminal."""
        terminal = PlainConsole(file=io.StringIO(), width=shutil.get_terminal_size((120, 24)).columns, highlight=False)
        self.print(terminal)
        return terminal.file.getvalue().rstrip()  # type: ignore[attr-defined]

    def print(self, terminal: Console) -> None:
        """Print the tables to a terminal, a wide one as several that fit."""
        for table in self.text_tables().values():
            for part in table.fitting(terminal.width):
                terminal.print(part)
                terminal.print()

    def _repr_html_(self) -> str:
        return str(self.chosen_table.drop(columns=self.digest_column, errors="ignore").to_html())


def saved_figure(figure: Figure, path: str | Path | None) -> Figure:
    """Write the figure to a file if a path is given, and return it."""
    if path is not None:
        path = Path(path)
        known = sorted(figure.canvas.get_supported_filetypes())
        if path.suffix.removeprefix(".").lower() not in known:
            raise UserError(f"{path}: not the name of a figure; end it in one of .{', .'.join(known)}")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    return figure
