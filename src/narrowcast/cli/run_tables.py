"""Finished runs as tables on a terminal: one run, several compared, replicas averaged over their seeds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from narrowcast.platform.tracking import units
from narrowcast.platform.tracking.metric_labels import is_share, metric_label
from narrowcast.runs.comparison_tables import measured_metrics
from narrowcast.runs.result import Result
from narrowcast.runs.run_settings import differing_settings
from narrowcast.runs.text_table import TextTable


def result_table(result: Result) -> Table:
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
    """Return a row per combination of settings but the seed: mean and standard deviation (n - 1) over the seeds."""
    settings = [run.config.identity() for run in runs]
    differing = [path for path in differing_settings(settings) if path != "seed"]
    groups: dict[tuple[str, ...], list[Result]] = {}
    for its_settings, run in zip(settings, runs, strict=True):
        groups.setdefault(tuple(str(its_settings.get(path)) for path in differing), []).append(run)
    metrics = measured_metrics(runs)
    table = Table(*differing, box=box.SIMPLE_HEAD, pad_edge=False, title="Replicas", title_justify="left")
    costs = ("uplink", "downlink", "total", "wall time of one")
    for header in ("seeds", *(metric_label(f"test.{name}") + " (%)" * is_share(name) for name in metrics), *costs):
        table.add_column(header, justify="right")
    for values, group in groups.items():
        final = [
            [(100 if is_share(name) else 1) * run.final.get(f"test.{name}", np.nan) for run in group]
            for name in metrics
        ]
        table.add_row(
            *values,
            str(len(group)),
            *(_mean_and_spread(each) for each in final),
            *(
                units.format_bits(float(np.mean([getattr(run, name) for run in group])))
                for name in ("uplink_bits", "downlink_bits", "total_bits")
            ),
            units.format_seconds(float(np.mean([run.wall_seconds for run in group]))),
        )
    return table


def _mean_and_spread(values: Sequence[float]) -> str:
    mean = f"{np.mean(values):.2f}"
    return f"{mean} ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else mean
