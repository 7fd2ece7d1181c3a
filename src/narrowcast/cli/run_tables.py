"""Finished runs as tables on a terminal: one run, several compared, replicas averaged over their seeds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from narrowcast.platform.tracking import run_plots as plots
from narrowcast.platform.tracking import units
from narrowcast.runs.comparison import Comparison, differing_settings, primary_metric
from narrowcast.runs.result import Result, goal

_COSTS = ("uplink", "compression", "downlink", "total", "simulated\ntime", "wall\ntime")


def result_table(result: Result) -> Table:
    """Return the summary of a run in two columns."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in result.summary():
        table.add_row(label, value)
    return table


def comparison_table(comparison: Comparison) -> Table:
    """Return one row per run, with the best accuracy on each data set in bold."""
    runs = comparison.runs
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), caption_justify="left")
    table.add_column("run", overflow="fold")
    for header in ("algorithm", "data"):
        table.add_column(header, no_wrap=True)
    known = list(plots.METRICS)
    measured = [each for each in known if any(f"test.{each}" in run.final for run in runs)] or known[:1]
    headers = ["rounds", *(f"test\n{plots.METRICS[metric][0]}" for metric in measured), *_COSTS]
    for header in headers:  # wrapped in a narrow terminal, so that no number is cut
        table.add_column(header, justify="right", overflow="fold")
    best: dict[str, float] = {}
    for run in runs:
        best[run.file.data] = max(best.get(run.file.data, 0.0), _accuracy(run))
    for label, run in zip(comparison.labels(), runs, strict=True):
        table.add_row(
            Text(label),
            Text(run.file.algorithm),
            Text(run.file.data),
            str(run.file.rounds),
            *(
                Text(
                    units.format_percent(run.final.get(f"test.{metric}")),
                    style="bold" if metric == primary_metric(run) and 0 < _accuracy(run) == best[run.file.data] else "",
                )
                for metric in measured
            ),
            units.format_bits(run.uplink_bits),
            units.format_compression(run.uplink_bits, run.full_uplink_bits),
            units.format_bits(run.downlink_bits),
            units.format_bits(run.total_bits),
            units.format_seconds(run.simulated_seconds),
            units.format_seconds(run.wall_seconds),
        )
    if len(best) > 1:
        table.caption = Text(f"Different data sets ({', '.join(best)}): accuracy compares only within one.")
    return table


def traffic_table(comparison: Comparison) -> Table:
    """Return one row per run, with how many times its traffic is below that of each baseline.

    The baselines of the uplink are the whole model in float32, the changed rows in float32, and entropy-coded FedMF or
    FedAvg (`Comparison.coded_reference`); that of the total is the whole model in float32 both ways.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("times less traffic", overflow="fold")
    for header in ("uplink:\nfloat32", "uplink:\nchanged rows", "uplink:\nentropy-coded", "total:\nfloat32"):
        table.add_column(header, justify="right", overflow="fold")
    for label, run in zip(comparison.labels(), comparison.runs, strict=True):
        table.add_row(
            Text(label),
            units.format_compression(run.uplink_bits, run.full_uplink_bits),
            units.format_compression(run.uplink_bits, run.touched_uplink_bits or 0),
            units.format_compression(comparison.coded_ratio(run), 1.0),
            units.format_compression(run.total_bits, 2 * run.full_uplink_bits),
        )
    return table


def targets_table(comparison: Comparison) -> Table | None:
    """Return one row per run and target, with the cost of reaching it; None if no run has targets."""
    if not any(run.targets for run in comparison.runs):
        return None
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold")
    for header in ("target", "rounds", "uplink", "total", "simulated\ntime"):
        table.add_column(header, justify="right", overflow="fold")
    for label, run in zip(comparison.labels(), comparison.runs, strict=True):
        for target in run.targets:
            rounds, bits, seconds = target.rounds_to, target.uplink_bits_to, target.simulated_seconds_to
            total = target.total_bits_to
            table.add_row(
                Text(label),
                Text(goal(target)),
                units.NOT_KNOWN if rounds is None else str(rounds),
                units.NOT_KNOWN if bits is None else units.format_bits(bits),
                units.NOT_KNOWN if total is None else units.format_bits(total),
                units.NOT_KNOWN if seconds is None else units.format_seconds(seconds),
            )
    return table


def replicas_table(runs: Sequence[Result]) -> Table:
    """Return a row per combination of settings but the seed: mean and standard deviation (n - 1) over the seeds."""
    settings = [run.config.identity() for run in runs]
    differing = [path for path in differing_settings(settings) if path != "seed"]
    groups: dict[tuple[str, ...], list[Result]] = {}
    for its_settings, run in zip(settings, runs, strict=True):
        groups.setdefault(tuple(str(its_settings.get(path)) for path in differing), []).append(run)
    metrics = [name for name in plots.METRICS if f"test.{name}" in runs[0].final]
    table = Table(*differing, box=box.SIMPLE_HEAD, pad_edge=False, title="Replicas", title_justify="left")
    costs = ("uplink", "downlink", "total", "wall time of one")
    for header in ("seeds", *(f"{plots.METRICS[name][0]} (%)" for name in metrics), *costs):
        table.add_column(header, justify="right")
    for values, group in groups.items():
        final = [[100 * run.final.get(f"test.{name}", np.nan) for run in group] for name in metrics]
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


def _accuracy(run: Result) -> float:
    return run.final.get(f"test.{primary_metric(run)}", 0.0)
