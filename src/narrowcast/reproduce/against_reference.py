"""Runs of several methods compared with those of a reference, seed by seed and over users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from narrowcast.platform.types import FloatArray
from narrowcast.reproduce.results_csv import COUNTS, unpacked_hits
from narrowcast.reproduce.verdict import PaperVerdict, describe, mean_and_spread
from narrowcast.runs.significance import bootstrap_over_users, compare_paired, holm

Runs = Sequence[Mapping[str, Any]]
"""The results of one setting, by seed."""
Key = TypeVar("Key")
Values = Sequence[float] | FloatArray
"""A value for each seed."""


def accuracies(runs: Runs, metric: str) -> tuple[float, ...]:
    """Return the test metric of each run in percent."""
    return tuple(100 * run["final"].get(f"test.{metric}", 0.0) for run in runs)


def megabytes(runs: Runs) -> float:
    """Return the mean uplink and downlink of a run in MB."""
    return sum(float(run[column]) for run in runs for column in COUNTS) / len(runs) / 8e6


def against(every: Mapping[Key, Runs], reference: Runs, metric: str, users: int = 0) -> dict[Key, tuple[str, str]]:
    """Return for each setting its mean difference to the reference in points, and the verdict on it.

    p values are corrected over all settings. With `users`, the number of test users whose hits the runs hold, the
    verdict gives the interval over resampled users too.
    """
    theirs = accuracies(reference, metric)
    tests = {key: compare_paired(accuracies(runs, metric), theirs) for key, runs in every.items()}
    level, zero = (holm([getattr(test, name) for test in tests.values()]) for name in ("p_level", "p_zero"))
    said = {}
    for (key, test), p_level, p_zero in zip(tests.items(), level, zero, strict=True):
        words = [describe(test, p_level, p_zero, len(theirs)), _over_users(every[key], reference, users)]
        said[key] = f"{test.interval.mean:+.2f}", ", ".join(filter(None, words))
    return said


def paired_differences(pairs: Sequence[tuple[str, Values, Values]]) -> list[PaperVerdict]:
    """Return the first less the second of each named pair, by seed; p values are corrected over all pairs."""
    tests = [compare_paired(ours, theirs) for _, ours, theirs in pairs]
    level, zero = (holm([getattr(test, name) for test in tests]) for name in ("p_level", "p_zero"))
    verdicts = []
    for (what, ours, theirs), test, p_level, p_zero in zip(pairs, tests, level, zero, strict=True):
        each = tuple(float(one - other) for one, other in zip(ours, theirs, strict=True))
        said = describe(test, p_level, p_zero, len(each))
        verdicts.append(PaperVerdict(what, "", mean_and_spread(each), said, f"{test.interval.mean:+.2f}", each))
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
    for what, each in runs.items():
        up, down = (sum(run[column] for run in each) / len(each) for column in COUNTS)
        traffic = f"uplink smaller by {full[0] / up:.3g}, total by {sum(full) / (up + down):.3g}"
        difference, said = compared.get(what, ("", "reference"))
        ours = accuracies(each, metric)
        verdicts.append(PaperVerdict(what, "", mean_and_spread(ours), f"{said}; {traffic}", difference, ours))
    return verdicts


def _over_users(ours: Runs, theirs: Runs, users: int) -> str:
    if not users or not all("hits" in run for run in (*ours, *theirs)):
        return ""
    interval = bootstrap_over_users(*([100.0 * unpacked_hits(run, users) for run in runs] for runs in (ours, theirs)))
    return f"over users {interval.low:+.2f} to {interval.high:+.2f}"
