"""Finished solves compared with each other: a table, and the error against iterations and the time of the solver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from narrowcast.platform.config import suggest
from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking import units
from narrowcast.platform.tracking.curves import ITERATIONS, SOLVER_TIME, chosen_costs
from narrowcast.platform.tracking.metric_labels import format_metric, metric_label
from narrowcast.runs.run_comparison import RunComparison
from narrowcast.runs.run_settings import differing_settings, shown_setting
from narrowcast.runs.solve_result import SolveResult
from narrowcast.runs.text_table import Column, TextTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

AXES = {"iteration": ITERATIONS, "time": SOLVER_TIME}


class SolveComparison(RunComparison[SolveResult]):
    """Finished solves, in the order given."""

    digest_column = "answer_sha256"
    section = "problem"

    @cached_property
    def metrics(self) -> list[str]:
        """The metrics of any of the answers."""
        return list(dict.fromkeys(name for each in self.runs for name in each.final))

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
                **{f"solver_seconds_to/{each.metric}/{each.value:g}": each.solver_seconds_to for each in run.targets},
                "answer_sha256": run.file.answer_sha256,
            }
            for run, its_settings in zip(self.runs, self.settings, strict=True)
        ]
        return DataFrame(rows, index=self.labels())

    def text_tables(self) -> dict[str, TextTable]:
        """Return the tables by title: settings that differ, and results."""
        differing = [path for path in differing_settings(self.settings) if path != "seed"]
        shown = [[path, *(shown_setting(its.get(path)) for its in self.settings)] for path in differing]
        settings = TextTable(["setting", *self.labels()], shown, words=1 + len(self.runs))
        return {**({"Settings that differ": settings} if differing else {}), "Results": self.results_table()}

    def results_columns(self) -> dict[str, Column]:
        """Return the columns of the results by name: solver, problem, metrics of the answer, iterations and times."""
        targets = list(dict.fromkeys((each.metric, each.value) for run in self.runs for each in run.targets))

        def column(head: str, cell: Callable[[SolveResult], str], *, word: bool = False, usual: bool = True) -> Column:
            return Column(head, [cell(each) for each in self.runs], word, usual=usual)

        def metric(name: str) -> Callable[[SolveResult], str]:
            return lambda run: format_metric(name, run.final.get(name), run.file.shares)

        def time_to(target: tuple[str, float]) -> Callable[[SolveResult], str]:
            def cell(run: SolveResult) -> str:
                reached = {(each.metric, each.value): each.solver_seconds_to for each in run.targets}.get(target)
                return units.NOT_KNOWN if reached is None else units.format_short_seconds(reached)

            return cell

        paths = dict.fromkeys(path for each in self.settings for path in each)
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
                path: Column(path, [shown_setting(its.get(path)) for its in self.settings], word=True, usual=False)
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
        from narrowcast.platform.tracking.solve_figures import comparison_of_solves

        costs = chosen_costs(AXES, axes, " for solves")
        known = [*self.metrics, "residual"]
        if metric is not None and metric not in known:
            raise UserError(f'no run has the metric "{metric}"; measured: {", ".join(known)}{suggest(metric, known)}')
        tables = dict(zip(self.labels(), (run.history for run in self.runs), strict=True))
        return comparison_of_solves(tables, costs, metric or known[0])
