"""Direction of metrics: those that are better when lower, used for best values, targets and tables alike.

A model may declare its own in `lower_is_better`, the names of those metrics without their split. `declared` is None
for other models, whose metrics are known by the words in their names.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from narrowcast.platform.client_statistics import SPREADS, parted
from narrowcast.platform.kinds import optional

Declared = Collection[str] | None

_LOWER_IS_BETTER = frozenset(
    ("loss", "error", "errors", "mae", "mse", "rmse", "nll", "perplexity", "divergence", "crossentropy", "entropy")
)


def declared_by(model: Any) -> Declared:
    """Return the names of the metrics that a model declares as better when lower, None if it declares nothing."""
    return optional(model, "lower_is_better")


def lower_is_better(metric: str, declared: Declared = None) -> bool:
    """Return whether a metric, named `split.metric` or by its last part, measures an error: a loss, an RMSE, ..."""
    metric, statistic = parted(metric)
    if statistic in SPREADS:
        return True
    name = metric.rpartition(".")[2]
    if declared is not None:
        return name in declared
    return not _LOWER_IS_BETTER.isdisjoint(re.split(r"[^a-z]+", name.lower()))


def is_better(metric: str, value: float, than: float, declared: Declared = None) -> bool:
    """Return whether a value of the metric is strictly better than another; NaN never is, and any number beats it."""
    if than != than:  # noqa: PLR0124 - NaN
        return value == value  # noqa: PLR0124
    return value < than if lower_is_better(metric, declared) else value > than


def reaches(metric: str, value: float, target: float, declared: Declared = None) -> bool:
    """Return whether a value of the metric is as good as the target, or better."""
    return value <= target if lower_is_better(metric, declared) else value >= target


def relation(metric: str, declared: Declared = None) -> str:
    """Return the sign between a metric and its target: `≤` where lower is better, else `≥`."""
    return "≤" if lower_is_better(metric, declared) else "≥"
