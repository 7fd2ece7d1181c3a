"""The tables of a comparison: results, settings that differ, traffic against baselines, costs of targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from narrowcast.platform.client_statistics import CLIENTS, MEAN, SPLITS, STATISTICS, parted
from narrowcast.platform.tracking import units
from narrowcast.platform.tracking.metric_direction import is_better
from narrowcast.platform.tracking.metric_labels import metric_label, metrics_of, primary_metric
from narrowcast.platform.tracking.targets import RunTargetCost
from narrowcast.runs.result import Result
from narrowcast.runs.run_settings import SEEDS, shown_setting
from narrowcast.runs.seed_groups import SeedGroup
from narrowcast.runs.text_table import Column, TextTable, with_spread

if TYPE_CHECKING:
    from narrowcast.runs.comparison import Comparison


def results_columns(comparison: Comparison) -> dict[str, Column]:
    """Return the columns of the results, a cell for each group, by their names in `Comparison.table`.

    Metrics, bits and seconds are means. The best primary metric on each data set is bold if it stands out.
    """
    groups = comparison.groups
    measured = [f"test.{each}" for each in measured_metrics(comparison.runs)]
    others = dict.fromkeys(name for run in comparison.runs for name in run.final if name not in measured)
    # Where clients have models of their own, the metric of the global one says nothing of the method.
    personal = [f"{name}.{MEAN}" for name in measured if any(run.file.personal for run in comparison.runs)]
    personal = [name for name in personal if name in others]
    best = _best(groups)

    def column(head: str, cell: Callable[[SeedGroup], str], *, word: bool = False, usual: bool = True) -> Column:
        return Column(head, [cell(each) for each in groups], word, usual=usual)

    def metric(name: str, *, usual: bool) -> Column:
        cells = [with_spread(name, *each.statistics(_final(name)), each.shares) for each in groups]
        bold = frozenset(place for place, of_group in best.items() if of_group == name)
        label = f"{metric_label(parted(name)[0])} of clients" if name in personal else metric_label(name)
        return Column(label.replace(" ", "\n", 1), cells, bold=bold, usual=usual)

    def mean_bits(name: str) -> Callable[[SeedGroup], str]:
        return lambda group: units.format_bits(_mean(group, lambda run: getattr(run, name)))

    def mean_seconds(name: str) -> Callable[[SeedGroup], str]:
        return lambda group: units.format_seconds(_mean(group, lambda run: getattr(run, name)))

    def compression(group: SeedGroup) -> str:
        return units.format_compression(_sum(group, "uplink_bits"), _sum(group, "full_uplink_bits"))

    settings = dict.fromkeys(path for each in groups for path in each.settings)
    return {
        "algorithm": column("algorithm", lambda group: group.runs[0].file.algorithm, word=True),
        "data": column("data", lambda group: group.runs[0].file.data, word=True),
        "seeds": column("seeds", lambda group: str(len(group.runs)), usual=any(len(each.runs) > 1 for each in groups)),
        "seed": column("seed", lambda group: ", ".join(str(run.seed) for run in group.runs), usual=False),
        "rounds": column("rounds", lambda group: str(group.runs[0].file.rounds)),
        **{name: metric(name, usual=True) for name in measured},
        **{name: metric(name, usual=True) for name in personal},
        "uplink_bits": column("uplink", mean_bits("uplink_bits")),
        "uplink_ratio": column("compression", compression),
        "downlink_bits": column("downlink", mean_bits("downlink_bits")),
        "total_bits": column("total", mean_bits("total_bits")),
        "simulated_seconds": column("simulated\ntime", mean_seconds("simulated_seconds")),
        "wall_seconds": column("wall\ntime", mean_seconds("wall_seconds")),
        **{name: metric(name, usual=False) for name in others if name not in personal},
        **{
            path: column(path, lambda group, path=path: shown_setting(group.settings.get(path)), word=True, usual=False)  # type: ignore[misc]
            for path in settings
            if path not in ("rounds", *SEEDS)
        },
    }


def different_data(runs: Sequence[Result]) -> str:
    """Return the caption of a table of runs on several data sets, empty for one."""
    data = list(dict.fromkeys(run.file.data for run in runs))
    return f"Different data sets ({', '.join(data)}): metrics compare only within one." if len(data) > 1 else ""


def over_clients_table(comparison: Comparison) -> TextTable | None:
    """Return a row per group and metric with its statistics over clients; None if no run evaluated its clients."""
    names = dict.fromkeys(parted(name)[0] for run in comparison.runs for name in run.final if parted(name)[1])
    metrics = [f"{split}.{each}" for split in SPLITS for each in metrics_of(names, split) if each != "loss"]
    rows = [
        [
            group.label,
            metric_label(metric),
            *(
                with_spread(name, *group.statistics(_final(name)), group.shares)
                for name in (f"{metric}.{each}" for each in STATISTICS)
            ),
        ]
        for metric in metrics
        for group in comparison.groups
        if f"{metric}.{CLIENTS}" in group.runs[0].final
    ]
    heads = ["run", "metric", "mean", "worst 10 %", "best 10 %", "variance", "Gini", "clients"]
    caption = "Variances of metrics in percent are in percent squared."
    return TextTable(heads, rows, words=2, caption=caption) if rows else None


def differences_table(comparison: Comparison) -> TextTable | None:
    """Return the settings that differ between groups, the longer side downwards; None if none does."""
    found = comparison.differences
    if found.empty:
        return None
    corner = "setting"
    if len(found.index) < len(found.columns):
        found, corner = found.T, "run"
    rows = [
        [str(name), *(shown_setting(value) for value in values)]
        for name, values in zip(found.index, found.values, strict=True)
    ]
    return TextTable([corner, *map(str, found.columns)], rows, words=len(found.columns) + 1)


def traffic_table(comparison: Comparison) -> TextTable:
    """Return a row per group, with how many times its traffic is below that of each baseline.

    The baselines of the uplink are the whole model in float32, the changed rows in float32, and entropy-coded FedMF or
    FedAvg (`Comparison.coded_reference`); that of the total is the whole model in float32 both ways.
    """
    heads = (
        "times less traffic",
        "uplink:\nfloat32",
        "uplink:\nchanged rows",
        "uplink:\nentropy-coded",
        "total:\nfloat32",
    )
    rows = [
        [
            group.label,
            units.format_compression(_sum(group, "uplink_bits"), _sum(group, "full_uplink_bits")),
            units.format_compression(_sum(group, "uplink_bits"), _sum(group, "touched_uplink_bits")),
            units.format_compression(_mean(group, comparison.coded_ratio), 1.0),
            units.format_compression(_sum(group, "total_bits"), 2 * _sum(group, "full_uplink_bits")),
        ]
        for group in comparison.groups
    ]
    return TextTable(heads, rows)


def targets_table(comparison: Comparison) -> TextTable | None:
    """Return a row per group and target, with the mean cost of those that reached it; None if no run has targets."""
    rows = []
    for group in comparison.groups:
        for target in {(each.metric, each.value): each for run in group.runs for each in run.targets}.values():
            found = [each for run in group.runs for each in run.targets if _same(each, target)]
            reached = [each for each in found if each.rounds_to is not None]
            rows.append(
                [
                    group.label,
                    group.runs[0].file.goal(target),
                    f"{len(reached)} of {len(group.runs)}",
                    _shown([each.rounds_to for each in reached], lambda value: f"{value:g}"),
                    _shown([each.uplink_bits_to for each in reached], units.format_bits),
                    _shown([each.total_bits_to for each in reached], units.format_bits),
                    _shown([each.simulated_seconds_to for each in reached], units.format_seconds),
                ]
            )
    heads = ["run", "target", "reached", "rounds", "uplink", "total", "simulated\ntime"]
    if not any(len(each.runs) > 1 for each in comparison.groups):
        heads, rows = [each for each in heads if each != "reached"], [[*row[:2], *row[3:]] for row in rows]
    return TextTable(heads, rows) if rows else None


def measured_metrics(runs: Sequence[Result]) -> list[str]:
    """Return the test metrics of any of the runs; the loss only if there is nothing else, HR@10 if there is nothing."""
    found = metrics_of(dict.fromkeys(name for run in runs for name in run.final))
    return [each for each in found if each != "loss"] or found or ["hr@10"]


def _best(groups: Sequence[SeedGroup]) -> dict[int, str]:
    """Return the place of the best group on each data set, with its primary metric, if it stands out."""
    best: dict[tuple[str, str], tuple[int, float]] = {}
    for place, group in enumerate(groups):
        metric = primary_metric(group.runs[0].final)
        value = group.statistics(_final(metric))[0] if metric else np.nan
        if metric is None or not np.isfinite(value):
            continue
        known = best.get((group.runs[0].file.data, metric))
        if known is None or is_better(metric, value, known[1], group.runs[0].file.lower_is_better):
            best[group.runs[0].file.data, metric] = (place, value)
    of_data = {data: [each for each in groups if each.runs[0].file.data == data] for data, _ in best}
    return {
        place: metric
        for (data, metric), (place, _) in best.items()
        if _stands_out(groups[place], [each for each in of_data[data] if each is not groups[place]], metric)
    }


def _stands_out(best: SeedGroup, others: Sequence[SeedGroup], metric: str) -> bool:
    """Return whether the interval of a mean is apart from all others; single runs, which have none, are taken as exact.

    A group of several seeds beside a single run is not told apart from it.
    """
    values = [[run.final.get(metric, np.nan) for run in each.runs] for each in (best, *others)]
    if all(len(each) == 1 for each in values):
        return True
    from narrowcast.runs.significance import mean_interval  # imports SciPy

    ours, *theirs = (mean_interval(each) for each in values)
    return all(ours.low > each.high or ours.high < each.low or np.isnan(each.mean) for each in theirs)


def _final(name: str) -> Callable[[Result], float | None]:
    return lambda run: run.final.get(name)


def _mean(group: SeedGroup, value: Callable[[Result], float]) -> float:
    return group.statistics(value)[0]


def _sum(group: SeedGroup, name: str) -> int:
    return sum(getattr(run, name) for run in group.runs)


def _same(one: RunTargetCost, other: RunTargetCost) -> bool:
    return (one.metric, one.value) == (other.metric, other.value)


def _shown(values: Sequence[float | None], show: Callable[[float], str]) -> str:
    known = [each for each in values if each is not None]
    return show(float(np.mean(known))) if known and len(known) == len(values) else units.NOT_KNOWN
