"""Runs that differ in a few settings, and the spread over seeds of what they reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from narrowcast.platform.tracking import run_plots as plots
from narrowcast.platform.tracking import units


def spread_table(runs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Table:
    """A row for each combination of settings but the seed: mean and standard deviation (n - 1) over the seeds.

    Each run is its settings by dotted path, and its `result.json`.
    """
    differing = [path for path in runs[0][0] if len({str(settings.get(path)) for settings, _ in runs}) > 1]
    differing = [path for path in differing if path != "seed"]
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for settings, result in runs:
        groups.setdefault(tuple(str(settings.get(path)) for path in differing), []).append(result)
    metrics = [name for name in plots.METRICS if f"test.{name}" in runs[0][1]["final"]]
    table = Table(*differing, box=box.SIMPLE_HEAD, pad_edge=False, title="Replicas", title_justify="left")
    for header in ("seeds", *(f"{plots.METRICS[name][0]} (%)" for name in metrics), "uplink", "wall time of one"):
        table.add_column(header, justify="right")
    for values, results in groups.items():
        final = [[100 * result["final"].get(f"test.{name}", np.nan) for result in results] for name in metrics]
        table.add_row(
            *values,
            str(len(results)),
            *(_mean_and_spread(each) for each in final),
            units.format_bits(float(np.mean([result["uplink_bits"] for result in results]))),
            units.format_seconds(float(np.mean([result["wall_seconds"] for result in results]))),
        )
    return table


def _mean_and_spread(values: Sequence[float]) -> str:
    mean = f"{np.mean(values):.2f}"
    return f"{mean} ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else mean
