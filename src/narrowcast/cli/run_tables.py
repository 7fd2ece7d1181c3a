"""Finished runs as tables on a terminal: one run, several compared, replicas averaged over their seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from narrowcast.platform.tracking import units
from narrowcast.platform.tracking.metrics import metric_label
from narrowcast.runs.comparison import Comparison
from narrowcast.runs.comparison_tables import measured_metrics
from narrowcast.runs.finished_run import Column, FinishedRun, TextTable, table_of, with_spread
from narrowcast.runs.result import Result


def result_table(result: FinishedRun[Any]) -> Table:
    """Return the summary of a run in two columns."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in result.summary():
        table.add_row(label, value)
    return table


def replicas_table(runs: Sequence[Result]) -> TextTable:
    """Return a row per group of runs that differ in their seeds alone: the settings that differ, and the means."""
    comparison = Comparison(tuple(runs))
    settings, metrics = comparison.differences, [f"test.{name}" for name in measured_metrics(runs)]
    groups, means = comparison.groups, comparison.means.to_dict("records")
    return table_of(
        [
            *(Column(path, [str(value) for value in settings.loc[path]], word=True) for path in settings.index),
            Column("seeds", [str(len(group.runs)) for group in groups]),
            *(
                Column(
                    metric_label(name),
                    [
                        with_spread(name, of_group[name], of_group[f"{name} std"], group.shares)
                        for group, of_group in zip(groups, means, strict=True)
                    ],
                )
                for name in metrics
            ),
            *(
                Column(head, [units.format_bits(of_group[name]) for of_group in means])
                for head, name in (("uplink", "uplink_bits"), ("total", "total_bits"))
            ),
            Column(
                "wall time per run",
                [units.format_seconds(group.statistics(lambda run: run.wall_seconds)[0]) for group in groups],
            ),
        ]
    )
