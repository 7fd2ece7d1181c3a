"""Differences between groups of runs, seed by seed, with intervals and tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from narrowcast.platform.config.files import suggest
from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking import units
from narrowcast.platform.tracking.metrics import FractionMetrics, format_metric, is_fraction, metric_label
from narrowcast.runs.comparison_tables import SeedGroup
from narrowcast.runs.finished_run import TextTable
from narrowcast.runs.result import Result
from narrowcast.runs.significance import compare_paired, holm

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
    found = [group for group in groups if wanted == group.label] or [
        group for group in groups if any(fnmatchcase(run.name, wanted) for run in group.runs)
    ]
    found = found or [group for group in groups if group.label.partition(" (")[0] == wanted]
    if len(found) == 1:
        return found[0]
    labels = [group.label for group in groups]
    problem = f"{', '.join(each.label for each in found)} match it" if found else "no run is called so"
    raise UserError(
        f"against {wanted}: {problem}; give the name of one group, or of a run in it: {', '.join(labels)}"
        f"{'' if found else suggest(wanted, [name for group in groups for name in (group.label, *_names(group))])}"
    )


def _names(group: SeedGroup) -> list[str]:
    return [run.name for run in group.runs]


def paired_differences(
    groups: Sequence[SeedGroup], reference: SeedGroup, metrics: Sequence[str], seeds: SeedsOf
) -> list[PairedDifference]:
    """Return the difference of each other group on the data of the reference, metric by metric."""
    others = [
        group for group in groups if group is not reference and group.runs[0].file.data == reference.runs[0].file.data
    ]
    found = []
    for metric in metrics:
        tests = [_test(group, reference, metric, seeds) for group in others]
        known = [place for place, each in enumerate(tests) if each.pairs > 1]
        corrected = dict(zip(known, holm([tests[place].p for place in known]), strict=True)) if known else {}
        found += [replace(each, p_holm=corrected.get(place, np.nan)) for place, each in enumerate(tests)]
    return found


def _test(group: SeedGroup, reference: SeedGroup, metric: str, seeds: SeedsOf) -> PairedDifference:
    ours, theirs = (_by_seeds(side, metric, seeds) for side in (group, reference))
    common = [seed for seed in ours if seed in theirs]
    one, other = ([values[seed] for seed in common] for values in (ours, theirs))
    if not common:
        return PairedDifference(group.label, metric, 0, *[np.nan] * 5)
    if len(common) == 1:
        return PairedDifference(group.label, metric, 1, one[0] - other[0], *[np.nan] * 4)
    test = compare_paired(one, other)
    interval = test.interval
    return PairedDifference(
        group.label, metric, len(common), interval.mean, interval.low, interval.high, test.p_zero, np.nan
    )


def _by_seeds(group: SeedGroup, metric: str, seeds: SeedsOf) -> Mapping[Any, float]:
    values = ((seeds(run), run.final.get(metric)) for run in group.runs)
    return {key: value for key, value in values if value is not None and np.isfinite(value)}


def differences_table(found: Sequence[PairedDifference], reference: SeedGroup) -> TextTable:
    """Return a row for each difference; those of shares are in percentage points."""
    shares = reference.shares
    heads = ["run", "metric", "pairs", "difference", "95 % interval", "p", "p (Holm)"]
    rows = [
        [
            each.run,
            metric_label(each.metric),
            str(each.pairs),
            _signed(each.metric, each.difference, shares),
            "-"
            if np.isnan(each.low)
            else " to ".join(_signed(each.metric, end, shares) for end in (each.low, each.high)),
            _p_value(each.p),
            _p_value(each.p_holm),
        ]
        for each in found
    ]
    caption = f"Each run minus {reference.label}, seed by seed"
    if any(is_fraction(each.metric, shares) for each in found):
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
