"""Finished runs compared with each other, experiments or solves: tables, one figure and a page.

`RunComparison` has what both kinds share. Solves have their error against iterations and the time of the solver;
experiments have their metrics against costs, and may be grouped by seed.
"""

from __future__ import annotations

import io
import logging
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
from rich.console import Console

from narrowcast.platform.config.files import suggest
from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking import units
from narrowcast.platform.tracking.metrics import (
    ITERATIONS,
    SOLVER_TIME,
    chosen_costs,
    format_metric,
    lower_is_better,
    metric_label,
    primary_metric,
)
from narrowcast.runs import comparison_tables as tables
from narrowcast.runs import html_report
from narrowcast.runs.comparison_tables import SeedGroup, metrics_on_test, seed_groups
from narrowcast.runs.controls import remarks
from narrowcast.runs.finished_run import Column, FinishedRun, TextTable, table_of, with_spread
from narrowcast.runs.folder import SEEDS, codec_kinds, differing_settings, settings_of, shown_setting
from narrowcast.runs.result import Result, SolveResult
from narrowcast.runs.terminal_output import PlainConsole

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
            of_data = {path: str(value) for path, value in settings.items() if path.startswith(f"{section}.")}
            of_data["path"] = Path(of_data.pop(f"{section}.path", "")).name
            if sha256 and settings:
                first, its_sha256 = firsts.setdefault((run.file.seed, *sorted(of_data.items())), (label, sha256))
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
        names = self.columns or [name for name, column in known.items() if column.usual and name not in without]
        for name in names:
            if name not in known:
                usual = ", ".join(name for name, column in known.items() if column.usual)
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
        by_baseline: dict[tuple[str, str], dict[Any, RunT]] = {}
        for run in self.runs:
            for name, metrics in run.baselines.items():
                by_baseline.setdefault((name, getattr(run.file, self.section)), {}).setdefault(
                    tuple(metrics.items()), run
                )
        rows = []
        for (name, on), by_metrics in by_baseline.items():
            row = {"run": name, "algorithm": "baseline", "solver": "baseline", self.section: on}
            runs = list(by_metrics.values())
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
    def remarks(self) -> list[str]:
        """Lines below the tables."""
        return []

    @property
    def chosen_table(self) -> DataFrame:
        """`table` with the chosen columns, and settings that all runs share if they are among them."""
        if self.columns is None:
            return self.table
        self.results_table()  # refuses unknown columns
        table = self.table.copy()
        for name in self.columns:
            if name not in table:
                table[name] = [settings.get(name) for settings in self.settings]
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
        tables = self.text_tables()
        parts = [html_report.section(title, table.html()) for title, table in tables.items()]
        parts += [f"<p>{escape(line)}</p>" for line in self.remarks]
        curves = html_report.image(self.figure(), "metrics against costs, a line per run")
        parts.insert(1 + list(tables).index("Results"), html_report.section("Metrics and costs", curves))
        if (of_clients := self.clients_figure()) is not None:
            drawn = html_report.image(of_clients, "metric by percentile of the clients")
            parts.append(html_report.section("Distribution over clients", drawn))
        runs = [
            f"<details><summary>{escape(label)}</summary>{html_report.pairs(run.summary())}"
            f"{html_report.pairs(run.provenance())}{html_report.configuration(run.folder)}</details>"
            for label, run in zip(self.labels(), self.runs, strict=True)
        ]
        parts.append(html_report.section("Runs", "".join(runs)))
        page = html_report.html_page(f"Comparison of {', '.join(self.row_labels())}", parts)
        return html_report.write_report(page, path)

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
        for line in self.remarks:
            terminal.print(line, highlight=False, soft_wrap=True)

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


AXES = {"iteration": ITERATIONS, "time": SOLVER_TIME}


class SolveComparison(RunComparison[SolveResult]):
    """Finished solves, in the order given."""

    digest_column = "answer_sha256"
    section = "problem"

    @cached_property
    def metrics(self) -> list[str]:
        """The metrics of any of the answers."""
        return list(dict.fromkeys(name for run in self.runs for name in run.final))

    @cached_property
    def table(self) -> DataFrame:
        """One row per run: the settings that differ, metrics of the answer, iterations, and times in seconds."""
        from pandas import DataFrame

        differing = differing_settings(self.settings)
        rows = [
            {
                "solver": run.file.solver,
                "problem": run.file.problem,
                **{path: its_settings.get(path) for path in differing},
                **run.final,
                "residual": run.file.residual,
                "iterations": run.file.iterations,
                "stopped_by": run.file.stopped_by,
                "solver_seconds": run.solver_seconds,
                "wall_seconds": run.file.wall_seconds,
                **{
                    f"solver_seconds_to/{target.metric}/{target.value:g}": target.solver_seconds_to
                    for target in run.targets
                },
                "answer_sha256": run.file.answer_sha256,
            }
            for run, its_settings in zip(self.runs, self.settings, strict=True)
        ]
        return DataFrame(rows, index=self.labels())

    def text_tables(self) -> dict[str, TextTable]:
        """Return the tables by title: settings that differ, and results."""
        differing = [path for path in differing_settings(self.settings) if path != "seed"]
        shown = [[path, *(shown_setting(of_run.get(path)) for of_run in self.settings)] for path in differing]
        settings = TextTable(["setting", *self.labels()], shown, words=1 + len(self.runs))
        return {**({"Settings that differ": settings} if differing else {}), "Results": self.results_table()}

    def results_columns(self) -> dict[str, Column]:
        """Return the columns of the results by name: solver, problem, metrics of the answer, iterations and times."""
        targets = list(dict.fromkeys((target.metric, target.value) for run in self.runs for target in run.targets))

        def column(head: str, cell: Callable[[SolveResult], str], *, word: bool = False, usual: bool = True) -> Column:
            return Column(head, [cell(run) for run in self.runs], word, usual=usual)

        def metric(name: str) -> Callable[[SolveResult], str]:
            return lambda run: format_metric(name, run.final.get(name), run.file.shares)

        def time_to(target: tuple[str, float]) -> Callable[[SolveResult], str]:
            def cell(run: SolveResult) -> str:
                reached = {(goal.metric, goal.value): goal.solver_seconds_to for goal in run.targets}.get(target)
                return units.NOT_KNOWN if reached is None else units.format_short_seconds(reached)

            return cell

        paths = dict.fromkeys(path for settings in self.settings for path in settings)
        return {
            "solver": column("solver", lambda run: run.file.solver, word=True),
            "problem": column("problem", lambda run: run.file.problem, word=True),
            **{name: column(metric_label(name), metric(name)) for name in self.metrics},
            "iterations": column("iterations", lambda run: str(run.file.iterations)),
            "stopped_by": column("ended by", lambda run: run.file.stopped_by),
            **{
                f"solver_seconds_to/{name}/{value:g}": column(
                    f"time to\n{metric_label(name)} {value:g}", time_to((name, value))
                )
                for name, value in targets
            },
            "solver_seconds": column("time of\nthe solver", lambda run: units.format_short_seconds(run.solver_seconds)),
            "residual": column("residual", lambda run: f"{run.file.residual:.4g}", usual=False),
            "wall_seconds": column(
                "wall\ntime", lambda run: units.format_short_seconds(run.file.wall_seconds), usual=False
            ),
            **{
                path: Column(
                    path, [shown_setting(of_run.get(path)) for of_run in self.settings], word=True, usual=False
                )
                for path in paths
                if path not in ("iterations", "solver_seconds")
            },
        }

    def figure(self, axes: Sequence[str] | None = None, metric: str | None = None) -> Figure:
        """Return a metric of every run against its costs, on a logarithmic axis if all values are positive.

        Args:
            axes: some of `iteration` and `time`; both by default.
            metric: such as `relative_error`, or `residual`; the first metric of the first run by default.

        """
        from narrowcast.platform.tracking.figures import comparison_of_solves

        costs = chosen_costs(AXES, axes, " for solves")
        known = [*self.metrics, "residual"]
        if metric is not None and metric not in known:
            raise UserError(f'no run has the metric "{metric}"; measured: {", ".join(known)}{suggest(metric, known)}')
        tables = dict(zip(self.labels(), (run.history for run in self.runs), strict=True))
        return comparison_of_solves(tables, costs, metric or known[0])


_BASELINES = ("fedmf", "fedavg")
LEVEL = 0.003
"""Largest distance below the float32 baseline at which an accuracy counts as level with it."""


@dataclass(frozen=True)
class Comparison(RunComparison[Result]):
    """Finished runs, in the order given. With `by_seed`, runs that differ only in their seeds form one group.

    With `against`, the name of a group or of a run in it, the tables have the differences from it, seed by seed.
    """

    by_seed: bool = True
    against: str | None = None
    added: tuple[str, ...] = ()
    """The names of the runs that were added as controls."""

    digest_column = "model_sha256"
    section = "data"

    def row_labels(self) -> list[str]:
        """Return the labels of the groups."""
        return [group.label for group in self.groups]

    def results_columns(self) -> dict[str, Column]:
        """Return the columns of the results by name, with a cell per group: final metrics, traffic and time."""
        return tables.results_columns(self.runs, self.groups)

    @property
    def caption(self) -> str:
        """The remark on runs of several data sets, empty for one."""
        return tables.different_data(self.runs)

    @property
    def remarks(self) -> list[str]:
        """Return the lines on the controls of personal methods, see `narrowcast.runs.controls`."""
        return remarks(self.groups, self.settings_by_run, self.added)

    @property
    def settings_by_run(self) -> dict[Path, Mapping[str, Any]]:
        """The settings of each run, by its folder."""
        return {run.folder: of_run for run, of_run in zip(self.runs, self.settings, strict=True)}

    @cached_property
    def groups(self) -> list[SeedGroup]:
        """The runs in groups of those that differ in their seeds alone; one group per run without `by_seed`."""
        return seed_groups(self.runs, self.settings, self.labels(), by_seed=self.by_seed)

    @cached_property
    def differences(self) -> DataFrame:
        """One row per setting whose value is not the same in all groups, one column per group; seeds are left out."""
        from pandas import DataFrame, Index

        groups = self.groups
        paths = differing_settings([group.settings for group in groups])
        if self.by_seed:
            paths = [path for path in paths if path not in SEEDS]
        values = {group.label: [group.settings.get(path) for path in paths] for group in groups}
        return DataFrame(values, index=Index(paths, name="setting", dtype=object), dtype=object)

    @cached_property
    def table(self) -> DataFrame:
        """One row per run: what it is, the settings that differ, final metrics, bits, seconds, costs of targets.

        Bits and seconds are those of the whole run; `uplink_ratio` is uplink over that of the whole model in float32,
        `touched_ratio` over that of the changed rows in float32, `coded_ratio` over that of `coded_reference`.
        """
        from pandas import DataFrame

        differing = differing_settings(self.settings)
        rows = []
        for run, its_settings in zip(self.runs, self.settings, strict=True):
            targets = {f"rounds_to/{target.metric}/{target.value:g}": target.rounds_to for target in run.targets}
            rows.append(
                {
                    "algorithm": run.file.algorithm,
                    "data": run.file.data,
                    **{path: its_settings.get(path) for path in differing},
                    "rounds": run.file.rounds,
                    **run.final,
                    "uplink_bits": run.uplink_bits,
                    "uplink_ratio": run.uplink_bits / run.full_uplink_bits if run.full_uplink_bits else np.nan,
                    "touched_ratio": run.uplink_bits / run.touched_uplink_bits if run.touched_uplink_bits else np.nan,
                    "coded_ratio": self.coded_ratio(run),
                    "downlink_bits": run.downlink_bits,
                    "total_bits": run.total_bits,
                    "simulated_seconds": run.simulated_seconds,
                    "wall_seconds": run.wall_seconds,
                    **targets,
                    "model_sha256": run.model_sha256,
                }
            )
        return DataFrame(rows, index=self.labels())

    @cached_property
    def means(self) -> DataFrame:
        """One row per group: its number of seeds, the settings that differ, means, and standard deviations (n - 1).

        The standard deviation of a column is named after it, with ` std`; it is NaN for a single run.
        """
        from pandas import DataFrame

        rows = []
        for group in self.groups:
            row = {"seeds": len(group.runs), **dict(self.differences[group.label])}
            for name in (*metrics_on_test(self.runs), "uplink_bits", "total_bits"):
                row[name], row[f"{name} std"] = group.statistics(lambda run, name=name: self._value(run, name))  # type: ignore[misc]
            row["simulated_seconds"], row["simulated_seconds std"] = group.statistics(lambda run: run.simulated_seconds)
            rows.append(row)
        return DataFrame(rows, index=[group.label for group in self.groups])

    @staticmethod
    def _value(run: Result, name: str) -> float | None:
        return getattr(run, name) if name.endswith("_bits") else run.final.get(name)

    def coded_reference(self, run: Result) -> Result | None:
        """Return the entropy-coded baseline of a run's data: lossy coding that is level with float32, and no more.

        Of the runs of `fedmf` and `fedavg` on the same data whose codec ends in `entropy`, it is the one with the
        fewest uplink bits of those at most `LEVEL` below the float32 run of the same algorithm. None without such runs.
        """
        codecs = {
            candidate.folder: codec_kinds(settings)
            for candidate, settings in zip(self.runs, self.settings, strict=True)
        }
        of_data = [
            candidate
            for candidate in self.runs
            if candidate.file.data == run.file.data and candidate.file.algorithm in _BASELINES
        ]
        plain = [candidate for candidate in of_data if not codecs[candidate.folder]]
        float32 = {candidate.file.algorithm: _primary(candidate) for candidate in plain}
        coded = [candidate for candidate in of_data if codecs[candidate.folder][-1:] == ["entropy"]]
        level = [
            candidate
            for candidate in coded
            if _primary(candidate) >= float32.get(candidate.file.algorithm, np.inf) - LEVEL
        ]
        return min(level, key=_share_of_full, default=None)

    def coded_ratio(self, run: Result) -> float:
        """Return a run's uplink for each upload over that of its `coded_reference`; NaN if there is none."""
        reference = self.coded_reference(run)
        return np.nan if reference is None else _share_of_full(run) / _share_of_full(reference)

    def text_tables(self) -> dict[str, TextTable]:
        """Return the tables by title: settings that differ, results, metrics over clients, traffic, targets."""
        by_title = {
            "Settings that differ": tables.differences_table(self.differences),
            "Results": self.results_table(),
            "Differences by seed": self._paired_table(),
            "Metrics over clients": tables.over_clients_table(self.runs, self.groups),
            "Traffic against baselines": tables.traffic_table(self.groups, self.coded_ratio),
            "Costs of targets": tables.targets_table(self.groups),
        }
        return {title: table for title, table in by_title.items() if table is not None}

    def replicas_table(self) -> TextTable:
        """Return a row per group, for a terminal: the settings that differ, means of the test metrics, and costs."""
        return tables.replicas_table(self.differences, self.groups, self.means)

    def paired_differences(self, against: str | None = None, metrics: Sequence[str] | None = None) -> DataFrame:
        """Return one row per other group and metric: its mean difference from the reference over seeds of both.

        Columns: run, metric, pairs, difference, low and high (95 % by Student's t), p (paired t test of no difference)
        and p_holm (corrected for the number of groups). Shares are between 0 and 1.

        Args:
            against: the name of a group, of a run in it, or a pattern of such names; by default that of the comparison.
            metrics: such as `test.accuracy`; by default the chosen columns that are metrics, or all of the test split.

        Raises:
            UserError: there is no such group, or it was not measured so.

        """
        from pandas import DataFrame

        wanted = self.against if against is None else against
        if wanted is None:
            raise UserError("name the group that the others are compared with, such as against='fedavg'")
        return DataFrame([vars(difference) for difference in self._paired(wanted, metrics)], columns=tables.FIELDS)

    def _paired(self, against: str, metrics: Sequence[str] | None) -> list[tables.PairedDifference]:
        known = dict.fromkeys(name for run in self.runs for name in run.final)
        chosen = [name for name in self.columns or () if name in known]
        usual = chosen or [name for name in metrics_on_test(self.runs) if name in known]
        for name in metrics or ():
            if name not in known:
                raise UserError(f'no run has the metric "{name}"; measured: {", ".join(known)}{suggest(name, known)}')
        seeds = self.settings_by_run
        return tables.paired_differences(
            self.groups,
            tables.reference_of(self.groups, against),
            list(metrics or usual),
            lambda run: tuple(str(seeds[run.folder].get(path, run.seed)) for path in SEEDS),
        )

    def _paired_table(self) -> TextTable | None:
        if self.against is None:
            return None
        return tables.paired_table(self._paired(self.against, None), tables.reference_of(self.groups, self.against))

    def figure(self, axes: Sequence[str] | None = None, metric: str | None = None) -> Figure:
        """Return each group's metric against its costs, with bands of one standard deviation over the seeds.

        Args:
            axes: some of `round`, `uplink`, `total` and `time`; all that were recorded by default.
            metric: such as `test.accuracy`; the primary test metric of each run by default.

        """
        from narrowcast.runs.comparison_figure import comparison_figure

        return comparison_figure(self.groups, axes, metric)

    def clients_figure(self, path: str | Path | None = None, *, metric: str | None = None) -> Figure | None:
        """Return a metric's distribution over clients after the last evaluation: its value by percentile of clients.

        None if no run has evaluated its clients. With several seeds, a line is the mean over them.

        Args:
            path: file to which the figure is written too, in the format that its suffix names.
            metric: such as `test.accuracy`; by default that of the figure of a single run.

        """
        from narrowcast.runs.comparison_figure import clients_figure

        figure = clients_figure(self.groups, metric)
        return figure and saved_figure(figure, path)


def _primary(run: Result) -> float:
    """Return the primary metric, negated if it is better when lower."""
    name = primary_metric(run.final) or ""
    value = run.final.get(name, np.nan)
    return -value if lower_is_better(name, run.file.lower_is_better) else value


def _share_of_full(run: Result) -> float:
    return run.uplink_bits / run.full_uplink_bits if run.full_uplink_bits else np.nan
