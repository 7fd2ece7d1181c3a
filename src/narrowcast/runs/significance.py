"""Confidence intervals, equivalence tests and corrections for results of several seeds.

All functions take one value per seed, in any unit; margins and intervals have the same unit. Methods are compared seed
by seed, because equal seeds share cohorts and initial values.

Reference:
    D. J. Schuirmann, "A comparison of the two one-sided tests procedure and the power approach for assessing the
    equivalence of average bioavailability", J. Pharmacokinetics and Biopharmaceutics 15 (1987).
    S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian J. of Statistics 6 (1979).
    B. Efron and R. J. Tibshirani, "An Introduction to the Bootstrap" (1993), chapter 13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

MARGIN = 0.3
"""Largest difference, in percentage points of accuracy, that counts as level."""
CONFIDENCE = 0.95
COMPARABLE_SEEDS = 3
"""Seeds of validation results, below which a comparison of tuned methods is partly one of luck."""
_NO_SPREAD = 1e-9
"""Standard error over the margin or the mean, up to which values differ by rounding alone."""
_RESAMPLED_VALUES = 2**22
"""Counts that the bootstrap holds at a time: 32 MiB."""


@dataclass(frozen=True)
class MeanInterval:
    """A mean over seeds or users, with its confidence interval; one seed has the interval from -inf to inf."""

    mean: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class MeanTest:
    """A mean difference, tested for being zero and for being level.

    `p_zero`: p value of the two-sided t test of a mean of zero; small values say that the means differ. `p_level`: p
    value of the two one-sided tests of a mean outside of ±margin; small values say that it is inside. One value has no
    spread, and values that are equal to a billionth of margin or mean say nothing of it: these have p values of 1.
    """

    interval: MeanInterval
    p_zero: float
    p_level: float


def mean_interval(values: ArrayLike, confidence: float = CONFIDENCE) -> MeanInterval:
    """Return the mean of `values` [S] with its interval by Student's t."""
    return _interval(*_mean_and_error(values), confidence)


def paired_interval(ours: ArrayLike, theirs: ArrayLike, confidence: float = CONFIDENCE) -> MeanInterval:
    """Return the mean of `ours - theirs` [S], seed by seed, with its interval by Student's t.

    Raise `ValueError` if the numbers of seeds differ.
    """
    return mean_interval(_paired(ours, theirs), confidence)


def compare_with_published(
    ours: ArrayLike, published: float, *, margin: float = MARGIN, published_seeds: int | None = None
) -> MeanTest:
    """Test the mean of `ours` [S] against a published mean of which the spread is not known.

    The published number is taken as exact, unless `published_seeds` is given: then it is the mean of that many seeds
    with our standard deviation, independent of ours.
    """
    mean, error, freedom = _mean_and_error(ours)
    if published_seeds is not None:
        error *= np.sqrt(1 + (freedom + 1) / published_seeds)
    return _test(mean - published, error, freedom, margin)


def compare_paired(ours: ArrayLike, theirs: ArrayLike, *, margin: float = MARGIN) -> MeanTest:
    """Test the mean of `ours - theirs` [S], seed by seed; raise `ValueError` if the numbers of seeds differ."""
    return _test(*_mean_and_error(_paired(ours, theirs)), margin)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for their number by Holm's method, in the order given.

    Rejecting those of at most alpha keeps the probability of any false rejection in the family below alpha.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return corrected.tolist()


def bootstrap_over_users(
    ours: ArrayLike, theirs: ArrayLike, *, resamples: int = 10_000, confidence: float = CONFIDENCE, seed: int = 0
) -> MeanInterval:
    """Return the mean difference of two methods with its percentile interval over resampled users.

    Each resample draws users with replacement, the same for both methods and all seeds. The interval holds for the
    population that the users were drawn from, given these seeds; `compare_paired` holds for other seeds, given these
    users.

    Shapes: `ours`, `theirs` [S, U] hold each user's value (a hit as 0 or 1, or an NDCG) for each seed.
    Raise `ValueError` if the shapes differ.
    """
    by_user = _paired(ours, theirs).mean(axis=0)
    random, n_users = np.random.default_rng(seed), len(by_user)
    # Users with the same difference are exchangeable: drawing how many of each are in a resample draws its mean.
    values, counts = np.unique(by_user, return_counts=True)
    at_once = max(1, _RESAMPLED_VALUES // len(values))
    means = np.concatenate(
        [
            random.multinomial(n_users, counts / n_users, size=min(at_once, resamples - start)) @ values / n_users
            for start in range(0, resamples, at_once)
        ]
    )
    tail = (1 - confidence) / 2
    return MeanInterval(float(by_user.mean()), *map(float, np.quantile(means, [tail, 1 - tail])))


def _paired(ours: ArrayLike, theirs: ArrayLike) -> NDArray[np.float64]:
    our_values, their_values = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    if our_values.shape != their_values.shape:
        raise ValueError(f"paired values need the same shape, not {our_values.shape} and {their_values.shape}")
    return our_values - their_values


def _mean_and_error(values: ArrayLike) -> tuple[float, float, int]:
    """Return the mean, its standard error and the degrees of freedom."""
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or len(numbers) == 0:
        raise ValueError(f"expected one value per seed, not an array of shape {numbers.shape}")
    freedom = len(numbers) - 1
    error = float(np.std(numbers, ddof=1) / np.sqrt(len(numbers))) if freedom else np.inf
    return float(numbers.mean()), error, freedom


def _interval(mean: float, error: float, freedom: int, confidence: float) -> MeanInterval:
    if not freedom:
        return MeanInterval(mean, -np.inf, np.inf)
    from scipy import stats  # takes half a second

    half = error * float(stats.t.ppf((1 + confidence) / 2, freedom))
    return MeanInterval(mean, mean - half, mean + half)


def _test(mean: float, error: float, freedom: int, margin: float) -> MeanTest:
    interval = _interval(mean, error, freedom, CONFIDENCE)
    if not freedom or error <= _NO_SPREAD * max(margin, abs(mean)):
        return MeanTest(interval, 1.0, 1.0)
    from scipy import stats

    above_low, below_high = stats.t.sf([(mean + margin) / error, (margin - mean) / error], freedom)
    p_zero = 2 * float(stats.t.sf(abs(mean) / error, freedom))
    return MeanTest(interval, p_zero, float(max(above_low, below_high)))
