"""Statistics of a metric over clients: how evenly a model serves them.

`worst_10_percent`, `best_10_percent` and `variance` are those of q-FFL (Li et al., ICLR 2020, Table 1), as the released
code computes them (litian96/fair_flearn, plot_fairness.py).
"""

from __future__ import annotations

import numpy as np

from narrowcast.platform.types import FloatArray

MEAN, WORST, BEST, VARIANCE, GINI, CLIENTS = (
    "mean",
    "worst_10_percent",
    "best_10_percent",
    "variance",
    "gini",
    "clients",
)
SPLITS = ("test", "validation", "train")
"""The splits on which clients are evaluated, in the order in which results are shown."""
STATISTICS = (MEAN, WORST, BEST, VARIANCE, GINI, CLIENTS)
SPREADS = frozenset((VARIANCE, GINI))
"""The statistics that are better when lower, whatever the metric."""
_PERCENT_SQUARED = 1e4


def parted(name: str) -> tuple[str, str]:
    """Return `split.metric` and the statistic of a name such as `test.accuracy.variance`; no statistic is empty."""
    metric, _, last = name.rpartition(".")
    return (metric, last) if "." in metric and last in STATISTICS else (name, "")


def over_clients(values: FloatArray, *, lower_is_better: bool, share: bool) -> dict[str, float]:
    """Return the statistics of a metric's values, one for each client; clients with NaN, without samples, are left out.

    `worst_10_percent` and `best_10_percent` are the means over a tenth of the clients, rounded down and at least one.
    The variance is that of the population, in percent squared for a metric that is a `share` of 1. The Gini coefficient
    is the mean absolute difference between two clients over twice the mean, 0 if all are 0; NaN with negative values.
    """
    ordered = np.sort(values[~np.isnan(values)])
    if not len(ordered):
        return {**dict.fromkeys(STATISTICS, float("nan")), CLIENTS: 0.0}
    tenth = max(1, len(ordered) // 10)
    with np.errstate(over="ignore", invalid="ignore"):  # a metric may be infinite
        low, high = float(ordered[:tenth].mean()), float(ordered[-tenth:].mean())
        return {
            MEAN: float(ordered.mean()),
            WORST: high if lower_is_better else low,
            BEST: low if lower_is_better else high,
            VARIANCE: float(ordered.var()) * (_PERCENT_SQUARED if share else 1.0),
            GINI: _gini(ordered),
            CLIENTS: float(len(ordered)),
        }


def _gini(ordered: FloatArray) -> float:
    """Return the Gini coefficient of ascending values: sum of (2 i - n - 1) x_i over n times their sum, i from 1."""
    n, total = len(ordered), float(ordered.sum())
    if ordered[0] < 0:
        return float("nan")
    return float(((2 * np.arange(1, n + 1) - n - 1) * ordered).sum()) / (n * total) if total else 0.0
