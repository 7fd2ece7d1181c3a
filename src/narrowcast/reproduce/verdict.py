"""The comparison of a published number with ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from narrowcast.runs.significance import CONFIDENCE, MARGIN, MeanTest, compare_with_published, holm

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
    level, zero = (holm([getattr(test, name) for test in tests]) for name in ("p_level", "p_zero"))
    return [
        PaperVerdict(
            cell.what,
            f"{cell.paper:.2f}",
            mean_and_spread(cell.ours),
            describe(test, p_level, p_zero, len(cell.ours)),
            f"{round(test.interval.mean, 2) + 0.0:+.2f}",
            cell.ours,
        )
        for cell, test, p_level, p_zero in zip(cells, tests, level, zero, strict=True)
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
