"""Names and values of metrics as tables and figures show them: `test.hr@10` is test HR@10, in percent."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from narrowcast.platform.client_statistics import BEST, CLIENTS, GINI, MEAN, STATISTICS, VARIANCE, WORST, parted
from narrowcast.platform.kinds import optional
from narrowcast.platform.tracking.metric_direction import Declared
from narrowcast.platform.tracking.units import NOT_KNOWN, format_percent

_ACRONYMS = frozenset(("hr", "ndcg", "mrr", "map", "auc", "f1", "rmse", "mae", "mse", "nll", "r2", "iou"))
_SHARES = frozenset(("accuracy", "hr", "ndcg", "mrr", "map", "precision", "recall", "f1", "auc", "iou", "hit"))
_COSTS = {
    "uplink_bits": "uplink",
    "downlink_bits": "downlink",
    "total_bits": "uplink and downlink",
    "simulated_seconds": "simulated time",
}
_OF_THE_METRIC = ("", MEAN, WORST, BEST)  # statistics in the unit of the metric
_PREFERRED = ("hr@10", "ndcg@10", "accuracy")


def metric_label(name: str) -> str:
    """Return the name of a metric for people: `test.hr@10` is "test HR@10", `validation.top_5` "validation top 5"."""
    words = re.split(r"[._ ]+", _COSTS.get(name, name))
    words = [word.upper() if word.lower().partition("@")[0] in _ACRONYMS else word for word in words]
    return " ".join("Gini" if word == GINI else word for word in words)


def shares_of(model: Any) -> Declared:
    """Return the names of the metrics that a model declares as shares, None if it declares nothing."""
    return optional(model, "shares")


def is_share(name: str, shares: Declared = None) -> bool:
    """Return whether a metric, or a statistic of it over clients, lies between 0 and 1 and is shown in percent.

    `shares` are those that the model declares, without their split; None for models that declare nothing and for runs
    of earlier versions, whose metrics are known by the words in their names.
    """
    name, statistic = parted(name)
    metric = name.rpartition(".")[2]
    by_words = not _SHARES.isdisjoint(re.split(r"[._ @-]+", metric.lower()))
    return statistic in _OF_THE_METRIC and (by_words if shares is None else metric in shares)


def format_metric(name: str, value: float | None, shares: Declared = None) -> str:
    """Return a metric's value: a share in percent, another one with four digits, a dash if it was not measured."""
    if value is None or not math.isfinite(value):
        return NOT_KNOWN
    if is_share(name, shares) and 0 <= value <= 1:
        return format_percent(value)
    if abs(value) >= 9999.5:
        return f"{value:,.2f}" if abs(value) < 1e6 else f"{value:,.0f}"
    return f"{value:.4g}"


def over_clients_text(name: str, values: Mapping[str, float], shares: Declared = None) -> str:
    """Return the statistics over clients of a metric named `split.metric` in words, empty if there are none."""
    if f"{name}.{CLIENTS}" not in values:
        return ""
    shown = {
        statistic: format_metric(f"{name}.{statistic}", values.get(f"{name}.{statistic}"), shares)
        for statistic in STATISTICS
    }
    unit = " %²" if is_share(name, shares) else ""
    return (
        f"mean {shown[MEAN]}, worst 10 % {shown[WORST]}, best 10 % {shown[BEST]}, variance {shown[VARIANCE]}{unit}, "
        f"Gini {shown[GINI]} ({shown[CLIENTS]} clients)"
    )


def metrics_of(names: Iterable[str], split: str = "test") -> list[str]:
    """Return the metrics of a split without its name, HR@10, NDCG@10 and accuracy first and the loss last.

    Statistics over clients are left out.
    """
    of_split = (name.removeprefix(f"{split}.") for name in names if name.startswith(f"{split}."))
    found = dict.fromkeys(name for name in of_split if "." not in name)
    known = [each for each in _PREFERRED if each in found]
    own = [each for each in found if each not in (*_PREFERRED, "loss")]
    return [*known, *own, *(["loss"] if "loss" in found else [])]


def primary_metric(names: Iterable[str]) -> str | None:
    """Return the metric, named `split.metric`, that a run is judged by, given the names of all that it measured.

    The first of its test metrics in the order of `metrics_of`, or None if nothing was measured on test.
    """
    return next((f"test.{each}" for each in metrics_of(names)), None)
