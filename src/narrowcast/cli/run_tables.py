"""Finished runs as tables on a terminal: one run, several compared, replicas averaged over their seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from narrowcast.platform.tracking import units
from narrowcast.platform.tracking.metric_labels import metric_label
from narrowcast.runs.comparison import Comparison
from narrowcast.runs.comparison_tables import measured_metrics
from narrowcast.runs.finished_run import FinishedRun
from narrowcast.runs.result import Result
from narrowcast.runs.text_table import TextTable, with_spread


def result_table(result: FinishedRun[Any]) -> Table:
    """Return the summary of a run in two columns."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in result.summary():
        table.add_row(label, value)
    return table


def as_table(text: TextTable) -> Table:
    """Return a table for the terminal, wrapped in a narrow one so that no number is cut."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), caption_justify="left")
    for column, head in enumerate(text.heads):
        is_name = 0 < column < text.words
        table.add_column(head, justify="left" if column < text.words else "right", no_wrap=is_name, overflow="fold")
    for row, cells in enumerate(text.rows):
        shown = (Text(cell, style="bold" if (row, column) in text.bold else "") for column, cell in enumerate(cells))
        table.add_row(*shown)
    table.caption = Text(text.caption) if text.caption else None
    return table


def replicas_table(runs: Sequence[Result]) -> Table:
    """Return a row per group of runs that differ in their seeds alone: the settings that differ, and the means."""
    comparison = Comparison(tuple(runs))
    settings, metrics = comparison.differences, [f"test.{name}" for name in measured_metrics(runs)]
    table = Table(*settings.index, box=box.SIMPLE_HEAD, pad_edge=False, title="Replicas", title_justify="left")
    for header in ("seeds", *map(metric_label, metrics), "uplink", "total", "wall time of one"):
        table.add_column(header, justify="right")
    for group, (_, means) in zip(comparison.groups, comparison.means.iterrows(), strict=True):
        table.add_row(
            *map(str, settings[group.label]),
            str(len(group.runs)),
            *(with_spread(name, means[name], means[f"{name} std"], group.shares) for name in metrics),
            *(units.format_bits(means[name]) for name in ("uplink_bits", "total_bits")),
            units.format_seconds(group.statistics(lambda run: run.wall_seconds)[0]),
        )
    return table
