"""Metrics of a run: statistics over clients, direction, names, curves against a cost, and the cost of a target.

A metric is named `split.metric`, such as `test.hr@10`. A model may declare which of its metrics are better when lower
and which are shares of 1, by their names without the split; a model that declares nothing, for which `declared` and
`shares` are None, has metrics that are known by the words in their names. Importing this module does not import
Matplotlib.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

from narrowcast.platform.config.files import flatten, suggest
from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking.units import BYTE_UNITS, NOT_KNOWN, TIME_UNITS, Unit, format_percent
from narrowcast.platform.types import BoolArray, FloatArray


@dataclass(frozen=True)
class Cost:
    """The horizontal axis of an accuracy plot: a column that grows from round to round."""

    column: str
    label: str
    units: tuple[Unit, ...]

    def axis_label(self, unit: Unit) -> str:
        """Return the label of an axis in this unit."""
        return f"{self.label} ({unit.symbol})" if unit.symbol else self.label


ROUND = Cost("round", "round", (Unit("", 1),))
UPLINK = Cost("total_uplink_bits", "cumulative uplink", BYTE_UNITS)
TOTAL = Cost("total_bits", "cumulative uplink and downlink", BYTE_UNITS)
TIME = Cost("simulated_seconds", "simulated time", TIME_UNITS)
ITERATIONS = Cost("iteration", "iteration", (Unit("", 1),))
SOLVER_TIME = Cost("solver_seconds", "time of the solver", (Unit("ms", 1e-3), *TIME_UNITS))


def chosen_costs(known: Mapping[str, Cost], names: Sequence[str] | None, of: str = "") -> list[Cost]:
    """Return the costs of these names, each once, or all of them; raise `UserError` for a name that is not known."""
    wrong = [name for name in names or () if name not in known]
    if wrong or (names is not None and not names):
        raise UserError(f"no axis {', '.join(map(repr, wrong)) or 'given'}; known{of}: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names or known)]


def column(table: pa.Table, name: str) -> FloatArray:
    """Return a column as floats, with NaN for null."""
    values: FloatArray = table.column(name).cast(pa.float64()).to_numpy()
    return values


def curve(rounds: pa.Table, cost: Cost, name: str) -> tuple[FloatArray, FloatArray]:
    """Return cost and value of the rounds with a finite value; empty without such a column."""
    if name not in rounds.column_names or cost.column not in rounds.column_names:
        return np.empty(0), np.empty(0)
    values = column(rounds, name)
    measured: BoolArray = np.isfinite(values)
    return column(rounds, cost.column)[measured], values[measured]


def running_mean(values: FloatArray, window: int) -> FloatArray:
    """Return the mean over an odd window centred on each value, truncated at the ends."""
    ones = np.ones(window)
    return np.convolve(values, ones, "same") / np.convolve(np.ones_like(values), ones, "same")


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
BETTER = "better_than_global"
"""The share of the clients whose own model is better than the global one; of clients with models of their own."""
NEW, GLOBAL = "new.", "global."
"""Before the names of metrics of new clients, and of those of the global model where clients have their own."""
SUCCESS = "attack.success"
"""The share of test samples for which the global model says what attackers want."""
_PERCENT_SQUARED = 1e4


def split_statistic(name: str) -> tuple[str, str]:
    """Return `split.metric` and the statistic of a name such as `test.accuracy.variance`; no statistic is empty."""
    metric, _, last = name.rpartition(".")
    return (metric, last) if "." in metric and last in (*STATISTICS, BETTER) else (name, "")


def statistics_over_clients(values: FloatArray, *, lower_is_better: bool, share: bool) -> dict[str, float]:
    """Return the statistics of a metric's values, one for each client; clients with NaN, without samples, are left out.

    They tell how evenly a model serves the clients. `worst_10_percent` and `best_10_percent` are the means over a tenth
    of the clients, rounded down and at least one. The variance is that of the population, in percent squared for a
    metric that is a `share` of 1. These three are those of q-FFL (Li et al., ICLR 2020, Table 1), as the released code
    computes them (litian96/fair_flearn, plot_fairness.py). The Gini coefficient is the mean absolute difference between
    two clients over twice the mean, 0 if all are 0; NaN with negative values.
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


def share_better(values: FloatArray, than: FloatArray, *, lower_is_better: bool) -> float:
    """Return the share of the clients with samples whose value is strictly better than another one; NaN without any."""
    measured = ~np.isnan(values)
    better = values < than if lower_is_better else values > than
    return float(better[measured].mean()) if measured.any() else float("nan")


def _gini(ordered: FloatArray) -> float:
    """Return the Gini coefficient of ascending values: sum of (2 i - n - 1) x_i over n times their sum, i from 1."""
    n, total = len(ordered), float(ordered.sum())
    if ordered[0] < 0:
        return float("nan")
    return float(((2 * np.arange(1, n + 1) - n - 1) * ordered).sum()) / (n * total) if total else 0.0


LowerIsBetter = Collection[str] | None
"""The metrics that are better when lower; None leaves it to the words in their names."""
FractionMetrics = Collection[str] | None
"""The metrics between 0 and 1; None leaves it to the words in their names."""

_LOWER_IS_BETTER = frozenset(
    ("loss", "error", "errors", "mae", "mse", "rmse", "nll", "perplexity", "divergence", "crossentropy", "entropy")
)


def declared_by(model: Any) -> LowerIsBetter:
    """Return the names of the metrics that a model declares as better when lower, None if it declares nothing."""
    declared: LowerIsBetter = model.lower_is_better
    return declared


def lower_is_better(metric: str, declared: LowerIsBetter = None) -> bool:
    """Return whether a metric, named `split.metric` or by its last part, measures an error: a loss, an RMSE, ...

    So does the success of an attack, for who defends.
    """
    if metric == SUCCESS:
        return True
    metric, statistic = split_statistic(metric)
    if statistic in (*SPREADS, BETTER):
        return statistic != BETTER
    name = metric.rpartition(".")[2]
    if declared is not None:
        return name in declared
    return not _LOWER_IS_BETTER.isdisjoint(re.split(r"[^a-z]+", name.lower()))


def is_better(metric: str, value: float, than: float, declared: LowerIsBetter = None) -> bool:
    """Return whether a value of the metric is strictly better than another; NaN never is, and any number beats it."""
    if than != than:  # noqa: PLR0124 - NaN
        return value == value  # noqa: PLR0124
    return value < than if lower_is_better(metric, declared) else value > than


def reaches(metric: str, value: float, target: float, declared: LowerIsBetter = None) -> bool:
    """Return whether a value of the metric is as good as the target, or better."""
    return value <= target if lower_is_better(metric, declared) else value >= target


def relation(metric: str, declared: LowerIsBetter = None) -> str:
    """Return the sign between a metric and its target: `≤` where lower is better, else `≥`."""
    return "≤" if lower_is_better(metric, declared) else "≥"


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


def fraction_metrics(model: Any) -> FractionMetrics:
    """Return the names of the metrics that a model declares as shares, None if it declares nothing."""
    declared: FractionMetrics = model.shares
    return declared


def is_fraction(name: str, shares: FractionMetrics = None) -> bool:
    """Return whether a metric, or a statistic of it over clients, lies between 0 and 1 and is shown in percent.

    `shares` are those that the model declares, without their split; None for models that declare nothing and for runs
    of earlier versions, whose metrics are known by the words in their names.
    """
    if name == SUCCESS:
        return True
    name, statistic = split_statistic(name)
    metric = name.rpartition(".")[2]
    if statistic == BETTER:
        return True
    by_words = not _SHARES.isdisjoint(re.split(r"[._ @-]+", metric.lower()))
    return statistic in _OF_THE_METRIC and (by_words if shares is None else metric in shares)


def format_metric(name: str, value: float | None, shares: FractionMetrics = None) -> str:
    """Return a metric's value: a share in percent, another one with four digits, a dash if it was not measured."""
    if value is None or not math.isfinite(value):
        return NOT_KNOWN
    if is_fraction(name, shares) and 0 <= value <= 1:
        return format_percent(value)
    if abs(value) >= 9999.5:
        return f"{value:,.2f}" if abs(value) < 1e6 else f"{value:,.0f}"
    return f"{value:.4g}"


def over_clients_text(name: str, values: Mapping[str, float], shares: FractionMetrics = None) -> str:
    """Return the statistics over clients of a metric named `split.metric` in words, empty if there are none."""
    if f"{name}.{CLIENTS}" not in values:
        return ""
    shown = {
        statistic: format_metric(f"{name}.{statistic}", values.get(f"{name}.{statistic}"), shares)
        for statistic in STATISTICS
    }
    unit, better = " %²" if is_fraction(name, shares) else "", f"{name}.{BETTER}"
    above = f"; better than the global model for {format_metric(better, values[better])}" if better in values else ""
    return (
        f"mean {shown[MEAN]}, worst 10 % {shown[WORST]}, best 10 % {shown[BEST]}, variance {shown[VARIANCE]}{unit}, "
        f"Gini {shown[GINI]} ({shown[CLIENTS]} clients){above}"
    )


def metrics_of(names: Iterable[str], split: str = "test") -> list[str]:
    """Return the metrics of a split without its name, HR@10, NDCG@10 and accuracy first and the loss last.

    Statistics over clients are left out.
    """
    of_split = (name.removeprefix(f"{split}.") for name in names if name.startswith(f"{split}."))
    names_of_split = dict.fromkeys(name for name in of_split if "." not in name)
    known = [name for name in _PREFERRED if name in names_of_split]
    own_names = [name for name in names_of_split if name not in (*_PREFERRED, "loss")]
    return [*known, *own_names, *(["loss"] if "loss" in names_of_split else [])]


def primary_metric(names: Iterable[str]) -> str | None:
    """Return the metric, named `split.metric`, that a run is judged by, given the names of all that it measured.

    The first of its test metrics in the order of `metrics_of`, or None if nothing was measured on test.
    """
    return next((f"test.{name}" for name in metrics_of(names)), None)


def metrics_over_clients(names: Iterable[str]) -> list[str]:
    """Return the metrics that have statistics over clients, without losses.

    Those of new clients follow the others, and those of the global model, where clients have their own, come last.
    """
    over_clients = [metric for metric, statistic in map(split_statistic, names) if statistic == MEAN]
    return [
        f"{prefix}{split}.{name}"
        for prefix in ("", NEW, GLOBAL)
        for split in SPLITS
        for name in metrics_of([m.removeprefix(prefix) for m in over_clients if m.startswith(prefix)], split)
        if name != "loss"
    ]


def clients_metric(names: Iterable[str]) -> str | None:
    """Return the metric, named `split.metric`, that clients are judged by, given the names of all that was measured.

    The first one with statistics over clients, of test if there is one; None without.
    """
    over_clients = [metric for metric, statistic in map(split_statistic, names) if statistic == MEAN]
    return next((f"{split}.{name}" for split in SPLITS for name in metrics_of(over_clients, split)), None)


def headline_metric(names: Iterable[str], *, personal: bool) -> str | None:
    """Return the metric that a run is judged by: the `primary_metric`, or its mean over clients with own models."""
    names = list(names)
    of_clients = clients_metric(names) if personal else None
    return primary_metric(names) if of_clients is None else f"{of_clients}.{MEAN}"


def _by_metric(value: Any) -> Any:
    """`test: {accuracy: 0.8}`, as an override writes it, is `test.accuracy: [0.8]`."""
    if not isinstance(value, Mapping):
        return value
    return {name: entry if isinstance(entry, list | tuple) else [entry] for name, entry in flatten(value).items()}


Targets = Annotated[
    dict[str, Annotated[tuple[FiniteFloat, ...], Field(min_length=1)]],
    BeforeValidator(
        _by_metric,
        json_schema_input_type=dict[str, float | tuple[float, ...] | dict[str, float | tuple[float, ...]]],
    ),
]
"""The values that each metric, named `split.metric`, should reach."""


class TargetCost(BaseModel):
    """The cost up to the first evaluation at which a metric was as good as `value`; None if it never was.

    As good as: at least `value`, or at most `value` for a metric that is better when lower, such as `test.loss`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    columns: ClassVar[Mapping[str, str]]
    """The column of the journal with the cost so far, for each field."""
    metric: str
    value: float

    def metrics(self) -> dict[str, float]:
        """Return the costs by names such as `rounds_to.test.accuracy.0.8`, without nulls.

        MLflow's pages make a section of what is before a slash, so there is none.
        """
        costs = {name: getattr(self, name) for name in self.columns}
        return {f"{name}.{self.metric}.{self.value:g}": cost for name, cost in costs.items() if cost is not None}


class RunTargetCost(TargetCost):
    """Seconds on the virtual clock and bits, both summed over the run up to that round, and rounds."""

    columns = {
        "simulated_seconds_to": "simulated_seconds",
        "uplink_bits_to": "total_uplink_bits",
        "total_bits_to": "total_bits",
        "rounds_to": "round",
    }
    simulated_seconds_to: float | None
    uplink_bits_to: int | None
    total_bits_to: int | None
    rounds_to: int | None


class SolveTargetCost(TargetCost):
    """The iterations and the time of the solver up to that iteration."""

    columns = {"iterations_to": "iteration", "solver_seconds_to": "solver_seconds"}
    iterations_to: int | None
    solver_seconds_to: float | None


CostT = TypeVar("CostT", bound=TargetCost)


def check_targets(targets: Mapping[str, Sequence[float]], known: Iterable[str], shares: Collection[str] = ()) -> None:
    """Raise `UserError` for a metric that the run does not measure, or a target above 1 for one of `shares`.

    `shares`: the metrics, without their split, that the model declares to lie between 0 and 1.
    """
    known = sorted(known)
    for name, values in targets.items():
        if name not in known:
            raise UserError(
                f"targets.{name} is not a metric of this run; it measures {', '.join(known)}{suggest(name, known)}"
            )
        metric, statistic = split_statistic(name)
        bounded = statistic not in (VARIANCE, CLIENTS) and metric.rpartition(".")[2] in shares
        if (highest := max(values)) > 1 and bounded:
            raise UserError(
                f"targets.{name} = {highest:g}: the metric lies between 0 and 1, so no run reaches it; 0.8 is 80 %"
            )


def target_costs(
    kind: type[CostT],
    targets: Mapping[str, Collection[float]],
    rows: Sequence[Mapping[str, Any]],
    declared: LowerIsBetter = None,
) -> list[CostT]:
    """Return the cost of each target from the rows of the journal; only those that were evaluated count.

    `declared`: the metrics that are declared as better when lower.
    """
    reached = []
    for metric, values in targets.items():
        measured = [row for row in rows if row.get(metric) is not None]
        for value in values:
            first = next((row for row in measured if reaches(metric, row[metric], value, declared)), {})
            costs = {name: first.get(column) for name, column in kind.columns.items()}
            reached.append(kind(metric=metric, value=value, **costs))
    return reached
