"""Direction of metrics: those that are better when lower, used for best values, targets and tables alike."""

from __future__ import annotations

import re

_LOWER_IS_BETTER = frozenset(
    ("loss", "error", "errors", "mae", "mse", "rmse", "nll", "perplexity", "divergence", "crossentropy", "entropy")
)


def lower_is_better(metric: str) -> bool:
    """Return whether a metric, named `split.metric` or by its last part, measures an error: a loss, an RMSE, ..."""
    name = metric.rpartition(".")[2].lower()
    return not _LOWER_IS_BETTER.isdisjoint(re.split(r"[^a-z]+", name))


def is_better(metric: str, value: float, than: float) -> bool:
    """Return whether a value of the metric is strictly better than another; NaN never is, and any number beats it."""
    if than != than:  # noqa: PLR0124 - NaN
        return value == value  # noqa: PLR0124
    return value < than if lower_is_better(metric) else value > than


def reaches(metric: str, value: float, target: float) -> bool:
    """Return whether a value of the metric is as good as the target, or better."""
    return value <= target if lower_is_better(metric) else value >= target


def relation(metric: str) -> str:
    """Return the sign between a metric and its target: `≤` where lower is better, else `≥`."""
    return "≤" if lower_is_better(metric) else "≥"
