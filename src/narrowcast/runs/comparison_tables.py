"""The tables of a comparison: results, settings that differ, traffic against baselines, costs of targets.

Runs that differ in their seeds alone are taken together: means, standard deviations and mean curves. Groups are
compared seed by seed, with intervals and tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

from narrowcast.platform.config.files import suggest
from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking import metrics, units
from narrowcast.platform.tracking.metrics import (
    BETTER,
    CLIENTS,
    MEAN,
    STATISTICS,
    FractionMetrics,
    RunTargetCost,
    format_metric,
    headline_metric,
    is_better,
    is_fraction,
    metric_label,
    metrics_of,
    metrics_over_clients,
    split_statistic,
)
from narrowcast.platform.types import FloatArray
from narrowcast.runs.finished_run import Column, TextTable, table_of, with_spread
from narrowcast.runs.folder import SEEDS, shown_setting, without_seed
from narrowcast.runs.result import Result
from narrowcast.runs.significance import compare_paired, holm

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class SeedGroup:
    """One experiment run with one seed or several; `settings` are those of its first run by dotted path."""

    label: str
    runs: tuple[Result, ...]
    settings: Mapping[str, Any]

    @property
    def shares(self) -> FractionMetrics:
        """The metrics that the model declares as shares."""
        return self.runs[0].file.shares

    def statistics(self, value: Callable[[Result], float | None]) -> tuple[float, float]:
        """Return mean and standard deviation (n - 1) over the runs; NaN if a run lacks it, or for a single run."""
        values = np.array([np.nan if (number := value(run)) is None else number for run in self.runs], dtype=np.float64)
        return float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else np.nan

    def curve(self, cost: metrics.Cost, metric: str) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return mean cost, mean and standard deviation (n - 1) of a metric in the rounds that all runs evaluated."""
        of_runs = [_by_round(run, cost, metric) for run in self.runs]
        rounds = sorted(set.intersection(*(set(curve) for curve in of_runs)))
        points = np.array([[curve[index] for index in rounds] for curve in of_runs]).reshape(len(of_runs), -1, 2)
        spread = points[:, :, 1].std(axis=0, ddof=1) if len(of_runs) > 1 else np.zeros(len(rounds))
        return points[:, :, 0].mean(axis=0), points[:, :, 1].mean(axis=0), spread


def _by_round(run: Result, cost: metrics.Cost, metric: str) -> dict[float, tuple[float, float]]:
    rounds, values = metrics.curve(run.history, metrics.ROUND, metric)
    spent, _ = metrics.curve(run.history, cost, metric)
    return dict(zip(rounds.tolist(), zip(spent.tolist(), values.tolist(), strict=True), strict=True))


def seed_groups(
    runs: Sequence[Result], settings: Sequence[Mapping[str, Any]], labels: Sequence[str], *, by_seed: bool
) -> list[SeedGroup]:
    """Return the groups in the order of their first runs.

    Runs are together if all their settings but the `SEEDS` are the same, and their seeds are all different: runs
    with equal seeds repeat a result and add nothing to a mean. A run whose settings are unknown is by itself.
    """
    together: dict[Any, list[int]] = {}
    for index, (run, of_run) in enumerate(zip(runs, settings, strict=True)):
        fixed = sorted((path, str(value)) for path, value in of_run.items() if path not in SEEDS)
        key = (run.file.algorithm, run.file.data, run.file.rounds, *fixed) if by_seed and of_run else index
        together.setdefault(key, []).append(index)
    groups: list[SeedGroup] = []
    for indices in together.values():
        seeds = {tuple(str(settings[index].get(path)) for path in SEEDS) for index in indices}
        for members in [indices] if len(seeds) == len(indices) else [[index] for index in indices]:
            of_group = tuple(runs[index] for index in members)
            label = labels[members[0]] if len(members) == 1 else _common_name(of_group)
            groups.append(SeedGroup(label, of_group, settings[members[0]]))
    return _with_different_labels(groups)


def _common_name(runs: Sequence[Result]) -> str:
    names = {without_seed(run.name) for run in runs}
    return f"{min(names, key=len)} ({len(runs)} seeds)"


def _with_different_labels(groups: list[SeedGroup]) -> list[SeedGroup]:
    labels = [group.label for group in groups]
    return [
        group
        if labels.count(group.label) == 1
        else SeedGroup(f"{group.label} {group.runs[0].name}", group.runs, group.settings)
        for group in groups
    ]


def results_columns(runs: Sequence[Result], groups: Sequence[SeedGroup]) -> dict[str, Column]:
    """Return the columns of the results, a cell for each group, by their names in `Comparison.table`.

    Metrics, bits and seconds are means. The best primary metric on each data set is bold if it stands out.
    """
    measured, personal = metrics_on_test(runs), personal_metrics(runs)
    unmeasured = dict.fromkeys(name for run in runs for name in run.final if name not in measured)
    best = _best(groups)

    def column(head: str, cell: Callable[[SeedGroup], str], *, word: bool = False, usual: bool = True) -> Column:
        return Column(head, [cell(group) for group in groups], word, usual=usual)

    def metric(name: str, *, usual: bool) -> Column:
        cells = [with_spread(name, *group.statistics(_final(name)), group.shares) for group in groups]
        bold = frozenset(row for row, of_group in best.items() if of_group == name)
        label = _label(name) if name in personal else metric_label(name)
        return Column(label.replace(" ", "\n", 1), cells, bold=bold, usual=usual)

    def mean_bits(name: str) -> Callable[[SeedGroup], str]:
        return lambda group: units.format_bits(_mean(group, lambda run: getattr(run, name)))

    def mean_seconds(name: str) -> Callable[[SeedGroup], str]:
        return lambda group: units.format_seconds(_mean(group, lambda run: getattr(run, name)))

    def compression(group: SeedGroup) -> str:
        return units.format_compression(_sum(group, "uplink_bits"), _sum(group, "full_uplink_bits"))

    settings = dict.fromkeys(path for group in groups for path in group.settings)
    return {
        "algorithm": column("algorithm", lambda group: group.runs[0].file.algorithm, word=True),
        "data": column("data", lambda group: group.runs[0].file.data, word=True),
        "seeds": column(
            "seeds", lambda group: str(len(group.runs)), usual=any(len(group.runs) > 1 for group in groups)
        ),
        "seed": column("seed", lambda group: ", ".join(str(run.seed) for run in group.runs), usual=False),
        "rounds": column("rounds", lambda group: str(group.runs[0].file.rounds)),
        **{name: metric(name, usual=True) for name in measured},
        "uplink_bits": column("uplink", mean_bits("uplink_bits")),
        "uplink_ratio": column("compression", compression),
        "downlink_bits": column("downlink", mean_bits("downlink_bits")),
        "total_bits": column("total", mean_bits("total_bits")),
        "simulated_seconds": column("simulated\ntime", mean_seconds("simulated_seconds")),
        "wall_seconds": column("wall\ntime", mean_seconds("wall_seconds")),
        **{name: metric(name, usual=False) for name in unmeasured},
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


def over_clients_table(runs: Sequence[Result], groups: Sequence[SeedGroup]) -> TextTable | None:
    """Return a row per group and metric with its statistics over clients; None if no run evaluated its clients."""
    metrics = metrics_over_clients(name for run in runs for name in run.final)
    better = any(f"{metric}.{BETTER}" in run.final for run in runs for metric in metrics)
    statistics = (*STATISTICS, BETTER) if better else STATISTICS
    rows = [
        [
            group.label,
            metric_label(metric),
            *(
                with_spread(name, *group.statistics(_final(name)), group.shares)
                for name in (f"{metric}.{name}" for name in statistics)
            ),
        ]
        for metric in metrics
        for group in groups
        if f"{metric}.{CLIENTS}" in group.runs[0].final
    ]
    heads = ["run", "metric", "mean", "worst 10 %", "best 10 %", "variance", "Gini", "clients"]
    heads += ["better than\nthe global model"] * better
    caption = "Variances of metrics in percent are in percent squared."
    return TextTable(heads, rows, words=2, caption=caption) if rows else None


def differences_table(differences: DataFrame) -> TextTable | None:
    """Return the settings that differ between groups, the longer side downwards; None if none does."""
    if differences.empty:
        return None
    corner = "setting"
    if len(differences.index) < len(differences.columns):
        differences, corner = differences.T, "run"
    rows = [
        [str(name), *(shown_setting(value) for value in values)]
        for name, values in zip(differences.index, differences.values, strict=True)
    ]
    return TextTable([corner, *map(str, differences.columns)], rows, words=len(differences.columns) + 1)


def traffic_table(groups: Sequence[SeedGroup], coded_ratio: Callable[[Result], float]) -> TextTable:
    """Return a row per group, with how many times its traffic is below that of each baseline.

    The baselines of the uplink are the whole model in float32, the changed rows in float32, and entropy-coded FedMF or
    FedAvg, by the `coded_ratio` of each run; that of the total is the whole model in float32 both ways.
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
            units.format_compression(_mean(group, coded_ratio), 1.0),
            units.format_compression(_sum(group, "total_bits"), 2 * _sum(group, "full_uplink_bits")),
        ]
        for group in groups
    ]
    return TextTable(heads, rows)


def targets_table(groups: Sequence[SeedGroup]) -> TextTable | None:
    """Return a row per group and target, with the mean cost of those that reached it; None if no run has targets."""
    rows = []
    for group in groups:
        for target in {(goal.metric, goal.value): goal for run in group.runs for goal in run.targets}.values():
            goals = [goal for run in group.runs for goal in run.targets if _same(goal, target)]
            reached = [goal for goal in goals if goal.rounds_to is not None]
            rows.append(
                [
                    group.label,
                    group.runs[0].file.goal(target),
                    f"{len(reached)} of {len(group.runs)}",
                    _shown([cost.rounds_to for cost in reached], lambda value: f"{value:g}"),
                    _shown([cost.uplink_bits_to for cost in reached], units.format_bits),
                    _shown([cost.total_bits_to for cost in reached], units.format_bits),
                    _shown([cost.simulated_seconds_to for cost in reached], units.format_seconds),
                ]
            )
    heads = ["run", "target", "reached", "rounds", "uplink", "total", "simulated\ntime"]
    if not any(len(group.runs) > 1 for group in groups):
        heads, rows = [name for name in heads if name != "reached"], [[*row[:2], *row[3:]] for row in rows]
    return TextTable(heads, rows) if rows else None


def measured_metrics(runs: Sequence[Result]) -> list[str]:
    """Return the test metrics of any of the runs; the loss only if there is nothing else, HR@10 if there is nothing.

    Of runs without a global model they are those of their clients.
    """
    names = metrics_of(dict.fromkeys(split_statistic(name)[0] for run in runs for name in run.final))
    return [name for name in names if name != "loss"] or names or ["hr@10"]


def personal_metrics(runs: Sequence[Result]) -> list[str]:
    """Return the means over clients of the test metrics, `test.accuracy.mean`, if clients of a run have own models.

    The metrics of a global model then say nothing of the method.
    """
    names = [f"test.{name}.{MEAN}" for name in measured_metrics(runs) if any(run.file.personal for run in runs)]
    return [name for name in names if any(name in run.final for run in runs)]


def metrics_on_test(runs: Sequence[Result]) -> list[str]:
    """Return the names of `personal_metrics` and of `measured_metrics`."""
    return [*personal_metrics(runs), *(f"test.{name}" for name in measured_metrics(runs))]


def judged_by(groups: Sequence[SeedGroup]) -> list[str | None]:
    """Return the metric that each group is judged by: means over clients if those of any group have own models."""
    personal = any(run.file.personal for group in groups for run in group.runs)
    return [headline_metric(group.runs[0].final, personal=personal) for group in groups]


def _label(name: str) -> str:
    """Return the name of a metric for people, that of a mean over clients as `test accuracy of clients`."""
    metric, statistic = split_statistic(name)
    return f"{metric_label(metric)} of clients" if statistic == MEAN else metric_label(name)


def _best(groups: Sequence[SeedGroup]) -> dict[int, str]:
    """Return the place of the best group on each data set, with its primary metric, if it stands out."""
    best: dict[tuple[str, str], tuple[int, float]] = {}
    for row, (group, metric) in enumerate(zip(groups, judged_by(groups), strict=True)):
        value = group.statistics(_final(metric))[0] if metric else np.nan
        if metric is None or not np.isfinite(value):
            continue
        known = best.get((group.runs[0].file.data, metric))
        if known is None or is_better(metric, value, known[1], group.runs[0].file.lower_is_better):
            best[group.runs[0].file.data, metric] = (row, value)
    of_data = {data: [group for group in groups if group.runs[0].file.data == data] for data, _ in best}
    return {
        row: metric
        for (data, metric), (row, _) in best.items()
        if _stands_out(groups[row], [group for group in of_data[data] if group is not groups[row]], metric)
    }


def _stands_out(best: SeedGroup, others: Sequence[SeedGroup], metric: str) -> bool:
    """Return whether the interval of a mean is apart from all others; single runs, which have none, are taken as exact.

    A group of several seeds beside a single run is not told apart from it.
    """
    values = [[run.final.get(metric, np.nan) for run in group.runs] for group in (best, *others)]
    if all(len(value) == 1 for value in values):
        return True
    from narrowcast.runs.significance import mean_interval  # imports SciPy

    ours, *theirs = (mean_interval(value) for value in values)
    return all(ours.low > interval.high or ours.high < interval.low or np.isnan(interval.mean) for interval in theirs)


def _final(name: str) -> Callable[[Result], float | None]:
    return lambda run: run.final.get(name)


def _mean(group: SeedGroup, value: Callable[[Result], float]) -> float:
    return group.statistics(value)[0]


def _sum(group: SeedGroup, name: str) -> int:
    return sum(getattr(run, name) for run in group.runs)


def _same(goal: RunTargetCost, target: RunTargetCost) -> bool:
    return (goal.metric, goal.value) == (target.metric, target.value)


def _shown(values: Sequence[float | None], show: Callable[[float], str]) -> str:
    known = [value for value in values if value is not None]
    return show(float(np.mean(known))) if known and len(known) == len(values) else units.NOT_KNOWN


def replicas_table(settings: DataFrame, groups: Sequence[SeedGroup], means: DataFrame) -> TextTable:
    """Return a row per group: the settings that differ, its number of seeds, means of the test metrics, and costs."""
    runs = [run for group in groups for run in group.runs]
    names = metrics_on_test(runs)
    rows = means.to_dict("records")
    return table_of(
        [
            *(Column(path, [str(value) for value in settings.loc[path]], word=True) for path in settings.index),
            Column("seeds", [str(len(group.runs)) for group in groups]),
            *(
                Column(
                    _label(name),
                    [
                        with_spread(name, row[name], row[f"{name} std"], group.shares)
                        for group, row in zip(groups, rows, strict=True)
                    ],
                )
                for name in names
            ),
            *(
                Column(head, [units.format_bits(row[name]) for row in rows])
                for head, name in (("uplink", "uplink_bits"), ("total", "total_bits"))
            ),
            Column(
                "wall time per run",
                [units.format_seconds(group.statistics(lambda run: run.wall_seconds)[0]) for group in groups],
            ),
        ]
    )


SeedsOf = Callable[[Result], tuple[str, ...]]


@dataclass(frozen=True)
class PairedDifference:
    """The mean of a metric of one group minus that of the reference over the seeds that both have.

    `low` and `high` are the ends of its interval of 95 % by Student's t, and `p` is the p value of the paired t test of
    a mean of zero; both need two pairs. `p_holm` is corrected for the number of groups, metric by metric.
    """

    run: str
    metric: str
    pairs: int
    difference: float
    low: float
    high: float
    p: float
    p_holm: float


FIELDS = [field.name for field in fields(PairedDifference)]


def reference_of(groups: Sequence[SeedGroup], wanted: str) -> SeedGroup:
    """Return the group of this label, or of which a run has this name or matches this pattern; raise `UserError`."""
    matching = [group for group in groups if wanted == group.label] or [
        group for group in groups if any(fnmatchcase(run.name, wanted) for run in group.runs)
    ]
    matching = matching or [group for group in groups if group.label.partition(" (")[0] == wanted]
    if len(matching) == 1:
        return matching[0]
    labels = [group.label for group in groups]
    problem = f"{', '.join(group.label for group in matching)} match it" if matching else "no run is called so"
    raise UserError(
        f"against {wanted}: {problem}; give the name of one group, or of a run in it: {', '.join(labels)}"
        f"{'' if matching else suggest(wanted, [name for group in groups for name in (group.label, *_names(group))])}"
    )


def _names(group: SeedGroup) -> list[str]:
    return [run.name for run in group.runs]


def paired_differences(
    groups: Sequence[SeedGroup], reference: SeedGroup, metrics: Sequence[str], seeds: SeedsOf
) -> list[PairedDifference]:
    """Return the difference of each other group on the data of the reference, metric by metric."""
    compared = [
        group for group in groups if group is not reference and group.runs[0].file.data == reference.runs[0].file.data
    ]
    differences = []
    for metric in metrics:
        tests = [_test(group, reference, metric, seeds) for group in compared]
        known = [index for index, test in enumerate(tests) if test.pairs > 1]
        corrected = dict(zip(known, holm([tests[index].p for index in known]), strict=True)) if known else {}
        differences += [replace(test, p_holm=corrected.get(index, np.nan)) for index, test in enumerate(tests)]
    return differences


def _test(group: SeedGroup, reference: SeedGroup, metric: str, seeds: SeedsOf) -> PairedDifference:
    ours, theirs = (_by_seeds(side, metric, seeds) for side in (group, reference))
    common = [seed for seed in ours if seed in theirs]
    our_values, their_values = ([values[seed] for seed in common] for values in (ours, theirs))
    if not common:
        return PairedDifference(group.label, metric, 0, *[np.nan] * 5)
    if len(common) == 1:
        return PairedDifference(group.label, metric, 1, our_values[0] - their_values[0], *[np.nan] * 4)
    test = compare_paired(our_values, their_values)
    interval = test.interval
    return PairedDifference(
        group.label, metric, len(common), interval.mean, interval.low, interval.high, test.p_zero, np.nan
    )


def _by_seeds(group: SeedGroup, metric: str, seeds: SeedsOf) -> Mapping[Any, float]:
    values = ((seeds(run), run.final.get(metric)) for run in group.runs)
    return {key: value for key, value in values if value is not None and np.isfinite(value)}


def paired_table(differences: Sequence[PairedDifference], reference: SeedGroup) -> TextTable:
    """Return a row for each difference; those of shares are in percentage points."""
    shares = reference.shares
    heads = ["run", "metric", "pairs", "difference", "95 % interval", "p", "p (Holm)"]
    rows = [
        [
            difference.run,
            metric_label(difference.metric),
            str(difference.pairs),
            _signed(difference.metric, difference.difference, shares),
            "-"
            if np.isnan(difference.low)
            else " to ".join(_signed(difference.metric, end, shares) for end in (difference.low, difference.high)),
            _p_value(difference.p),
            _p_value(difference.p_holm),
        ]
        for difference in differences
    ]
    caption = f"Each run minus {reference.label}, seed by seed"
    if any(is_fraction(difference.metric, shares) for difference in differences):
        caption += "; those of percentages are in percentage points"
    return TextTable(heads, rows, words=2, caption=f"{caption}.")


def _signed(name: str, value: float, shares: FractionMetrics) -> str:
    if not np.isfinite(value):
        return units.NOT_KNOWN
    if is_fraction(name, shares):
        return f"{100 * value:+.2f}"
    shown = format_metric(name, value, shares)
    return shown if value < 0 else f"+{shown}"


def _p_value(p: float) -> str:
    if np.isnan(p):
        return units.NOT_KNOWN
    return f"{p:.3f}" if p >= 0.0005 else "< 0.0005"
