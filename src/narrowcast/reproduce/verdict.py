"""The comparison of a published number with ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PaperVerdict:
    """One row of a reproduction's table; `ours` is the mean of the values `by_seed`."""

    what: str
    paper: str
    ours: str
    verdict: str
    difference: str = ""
    by_seed: tuple[float, ...] = ()


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


def mean_and_spread(values: Sequence[float], digits: int = 2) -> str:
    """Format the mean and, for several seeds, the standard deviation (n - 1): `64.47 ± 0.21`."""
    mean = f"{np.mean(values):.{digits}f}"
    return f"{mean} ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else mean
