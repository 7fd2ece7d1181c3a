"""Verdicts on published numbers and on methods beside a reference, as tables for the terminal, Markdown and CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, TypeVar

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking.metrics import SUCCESS
from narrowcast.platform.types import FloatArray
from narrowcast.runs.significance import (
    CONFIDENCE,
    MARGIN,
    MeanTest,
    bootstrap_over_users,
    compare_paired,
    compare_with_published,
    holm,
)
from narrowcast.studies.results import COUNTS, unpacked_hits
from narrowcast.studies.spec import tested_name

PUBLISHED_SEEDS = 5
"""Seeds of the means that Nguyen et al. publish, of which they do not print the spread."""


@dataclass(frozen=True)
class PaperVerdict:
    """One row of a reproduction's table; `ours` is the mean of the values `by_seed`."""

    what: str
    paper: str
    ours: str
    verdict: str
    difference: str = ""
    by_seed: tuple[float, ...] = ()


@dataclass(frozen=True)
class PublishedMean:
    """A published mean and our values by seed, in the same unit."""

    what: str
    paper: float
    ours: tuple[float, ...]


def judge_mean(what: str, paper: float, ours: Sequence[float], tolerance: float, digits: int = 2) -> PaperVerdict:
    """Return the verdict on our mean over the seeds: reproduced if within the tolerance of the published number."""
    difference = float(np.mean(ours)) - paper
    agrees = abs(difference) <= tolerance + 1e-9
    return PaperVerdict(
        what,
        f"{paper:.{digits}f}",
        mean_and_spread(ours, digits),
        f"reproduced, within {tolerance:g}" if agrees else f"differs by more than {tolerance:g}",
        f"{round(difference, digits) + 0.0:+.{digits}f}",
        tuple(map(float, ours)),
    )


def judge_family(cells: Sequence[PublishedMean], margin: float = MARGIN) -> list[PaperVerdict]:
    """Return the verdict on each cell by equivalence test, with p values corrected over all cells by Holm's method.

    "level": the mean of further seeds is within the margin of the published number. "off by": it is not the published
    number. "not settled": neither can be said. The published numbers are taken as exact.
    """
    tests = [compare_with_published(cell.ours, cell.paper, margin=margin) for cell in cells]
    return [
        PaperVerdict(
            cell.what,
            f"{cell.paper:.2f}",
            mean_and_spread(cell.ours),
            describe(test, p_level, p_zero, len(cell.ours)),
            f"{round(test.interval.mean, 2) + 0.0:+.2f}",
            cell.ours,
        )
        for cell, (test, p_level, p_zero) in zip(cells, corrected(tests), strict=True)
    ]


def judge_with_published_spread(cells: Sequence[PublishedMean], margin: float = MARGIN) -> PaperVerdict:
    """Count the cells that differ if each published number is a mean of five seeds with our standard deviation."""
    tests = [
        compare_with_published(cell.ours, cell.paper, margin=margin, published_seeds=PUBLISHED_SEEDS) for cell in cells
    ]
    differ = [
        cell.what for cell, p in zip(cells, holm([test.p_zero for test in tests]), strict=True) if p < 1 - CONFIDENCE
    ]
    return PaperVerdict(
        f"cells off if the paper's means of {PUBLISHED_SEEDS} seeds have our spread",
        "",
        f"{len(differ)} of {len(cells)}",
        ", ".join(differ),
    )


def describe_order(test: MeanTest, p_zero: float, below: str, above: str) -> str:
    """Return `below` or `above` by the sign of a difference that is not zero, by its corrected p value."""
    if p_zero >= 1 - CONFIDENCE:
        return "not settled"
    return below if test.interval.mean < 0 else above


def bounds_of(test: MeanTest, digits: int = 2) -> str:
    """Return the interval of a difference in brackets."""
    return f"({test.interval.low:+.{digits}f} to {test.interval.high:+.{digits}f})"


def ordered_differences(
    tests: Mapping[str, MeanTest], below: str, above: str, *, digits: int = 2, unit: str = ""
) -> list[PaperVerdict]:
    """Return each named difference with its order, interval and p value, corrected over all of them."""
    p_values = holm([test.p_zero for test in tests.values()])
    return [
        PaperVerdict(
            what,
            "",
            f"{test.interval.mean:+.{digits}f}{unit}",
            f"{describe_order(test, p, below, above)} {bounds_of(test, digits)}, p = {p:.2g}",
        )
        for (what, test), p in zip(tests.items(), p_values, strict=True)
    ]


def corrected(tests: Sequence[MeanTest]) -> Iterator[tuple[MeanTest, float, float]]:
    """Return each test with its `p_level` and its `p_zero`, corrected over all of them by Holm's method."""
    return zip(tests, holm([test.p_level for test in tests]), holm([test.p_zero for test in tests]), strict=True)


def describe(test: MeanTest, p_level: float, p_zero: float, n_seeds: int) -> str:
    """Return a verdict from the interval of a difference and its p values, corrected if it is one of several."""
    interval, alpha = test.interval, 1 - CONFIDENCE
    if p_level < alpha:
        return f"level (p = {p_level:.2g})"
    bounds = f"({interval.low:+.2f} to {interval.high:+.2f})"
    if p_zero < alpha:
        return f"off by {interval.mean:+.2f} {bounds}"
    seeds = f"{n_seeds} seed{'s' * (n_seeds > 1)}"
    return f"not settled with {seeds}" + (f" {bounds}" if n_seeds > 1 else "")


def mean_and_spread(values: Sequence[float], digits: int = 2) -> str:
    """Format the mean and, for several seeds, the standard deviation (n - 1): `64.47 ± 0.21`."""
    mean = f"{np.mean(values):.{digits}f}"
    return f"{mean} ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else mean


_COLUMNS = ("", "paper", "ours", "difference", "verdict")


def verdict_table(title: str, verdicts: Sequence[PaperVerdict]) -> Table:
    """Return a terminal table with one row per verdict; empty columns are omitted."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    rows = [_COLUMNS, *map(_cells, verdicts)]
    shown = [column for column in range(len(_COLUMNS)) if any(row[column] for row in rows[1:])]
    for column in shown:
        table.add_column(_COLUMNS[column], justify="right" if 0 < column < 4 else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*(Text(row[column]) for column in shown))
    return table


def as_markdown(title: str, verdicts: Sequence[PaperVerdict], notes: Sequence[str]) -> str:
    """Return a heading, the notes and the table as Markdown."""
    rows = [_COLUMNS, ("---", "--:", "--:", "--:", "---"), *map(_cells, verdicts)]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([f"# {title}", "", *notes, "", *lines, ""])


def as_csv(verdicts: Sequence[PaperVerdict]) -> str:
    """Return the table as CSV, with the value of each seed."""
    stream = StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["what", *_COLUMNS[1:], "by_seed"])
    for verdict in verdicts:
        writer.writerow([*_cells(verdict), " ".join(f"{value:.6g}" for value in verdict.by_seed)])
    return stream.getvalue()


def _cells(verdict: PaperVerdict) -> tuple[str, ...]:
    return verdict.what, verdict.paper, verdict.ours, verdict.difference, verdict.verdict


Runs = Sequence[Mapping[str, Any]]
"""The results of one setting, by seed."""
Key = TypeVar("Key")
Values = Sequence[float] | FloatArray
"""A value for each seed."""


def accuracies(runs: Runs, metric: str) -> tuple[float, ...]:
    """Return the test metric of each run in percent, or the success of its attack; a run that failed has the worst.

    Raise `UserError` for `attack.success` of runs that did not measure it.
    """
    if metric != SUCCESS:
        return tuple(100 * run["final"].get(tested_name(metric), 0.0) for run in runs)
    if any(SUCCESS not in run["final"] and "error" not in run for run in runs):
        raise UserError(
            f"a run has no {SUCCESS}: it has no attack with a target, or its row is of an earlier version; give it an "
            "attack such as trigger, or run it again"
        )
    return tuple(100 * run["final"].get(SUCCESS, 1.0) for run in runs)


def megabytes(runs: Runs) -> float:
    """Return the mean uplink and downlink of a run in MB."""
    return sum(float(run[column]) for run in runs for column in COUNTS) / len(runs) / 8e6


def against(by_setting: Mapping[Key, Runs], reference: Runs, metric: str, users: int = 0) -> dict[Key, tuple[str, str]]:
    """Return for each setting its mean difference to the reference in points, and the verdict on it.

    p values are corrected over all settings. With `users`, the number of test users whose hits the runs hold, the
    verdict gives the interval over resampled users too.
    """
    theirs = accuracies(reference, metric)
    tests = [compare_paired(accuracies(runs, metric), theirs) for runs in by_setting.values()]
    verdicts = {}
    for (key, runs), (test, p_level, p_zero) in zip(by_setting.items(), corrected(tests), strict=True):
        words = [describe(test, p_level, p_zero, len(theirs)), _over_users(runs, reference, users)]
        verdicts[key] = f"{test.interval.mean:+.2f}", ", ".join(filter(None, words))
    return verdicts


def paired_differences(pairs: Sequence[tuple[str, Values, Values]]) -> list[PaperVerdict]:
    """Return the first less the second of each named pair, by seed; p values are corrected over all pairs."""
    tests = [compare_paired(ours, theirs) for _, ours, theirs in pairs]
    verdicts = []
    for (what, ours, theirs), (test, p_level, p_zero) in zip(pairs, corrected(tests), strict=True):
        differences = tuple(float(first - second) for first, second in zip(ours, theirs, strict=True))
        verdict = describe(test, p_level, p_zero, len(differences))
        verdicts.append(
            PaperVerdict(what, "", mean_and_spread(differences), verdict, f"{test.interval.mean:+.2f}", differences)
        )
    return verdicts


def compared_with_first(runs: Mapping[str, Runs], metric: str, dense_bits: int | None = None) -> list[PaperVerdict]:
    """Compare settings with the first one: accuracy, and traffic as multiples of what the others send.

    `dense_bits`: a round's updates in float32, in whose multiples the traffic is given in place of the first one's.
    """
    if not runs:
        return []
    reference, *_ = runs.values()
    compared = against(dict(list(runs.items())[1:]), reference, metric)
    first = [sum(run[column] for run in reference) / len(reference) for column in COUNTS]
    rounds = reference[0]["rounds"]
    full = first if dense_bits is None else [float(rounds * dense_bits)] * len(COUNTS)
    verdicts = []
    for what, of_setting in runs.items():
        up, down = (sum(run[column] for run in of_setting) / len(of_setting) for column in COUNTS)
        traffic = f"uplink smaller by {full[0] / up:.3g}, total by {sum(full) / (up + down):.3g}"
        difference, verdict = compared.get(what, ("", "reference"))
        ours = accuracies(of_setting, metric)
        verdicts.append(PaperVerdict(what, "", mean_and_spread(ours), f"{verdict}; {traffic}", difference, ours))
    return verdicts


def _over_users(ours: Runs, theirs: Runs, users: int) -> str:
    if not users or not all("hits" in run for run in (*ours, *theirs)):
        return ""
    interval = bootstrap_over_users(*([100.0 * unpacked_hits(run, users) for run in runs] for runs in (ours, theirs)))
    return f"over users {interval.low:+.2f} to {interval.high:+.2f}"
