"""The cost of reaching stated values of a run's metrics: simulated time, uplink bits, bits both ways and rounds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

from narrowcast.platform.client_statistics import CLIENTS, VARIANCE, parted
from narrowcast.platform.config import flatten, suggest
from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking.metric_direction import Declared, reaches


def _by_metric(value: Any) -> Any:
    """`test: {accuracy: 0.8}`, as an override writes it, is `test.accuracy: [0.8]`."""
    if not isinstance(value, Mapping):
        return value
    return {name: each if isinstance(each, list | tuple) else [each] for name, each in flatten(value).items()}


Targets = Annotated[
    dict[str, Annotated[tuple[FiniteFloat, ...], Field(min_length=1)]],
    BeforeValidator(
        _by_metric,
        json_schema_input_type=dict[str, float | tuple[float, ...] | dict[str, float | tuple[float, ...]]],
    ),
]
"""The values that each metric, named `split.metric`, should reach."""


class Reached(BaseModel):
    """The cost up to the first evaluation at which a metric was as good as `value`; None if it never was.

    As good as: at least `value`, or at most `value` for a metric that is better when lower, such as `test.loss`.
    Units: seconds on the virtual clock and bits, both summed over the run up to that round.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    metric: str
    value: float
    simulated_seconds_to: float | None
    uplink_bits_to: int | None
    total_bits_to: int | None
    rounds_to: int | None


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
        metric, statistic = parted(name)
        bounded = statistic not in (VARIANCE, CLIENTS) and metric.rpartition(".")[2] in shares
        if (highest := max(values)) > 1 and bounded:
            raise UserError(
                f"targets.{name} = {highest:g}: the metric lies between 0 and 1, so no run reaches it; 0.8 is 80 %"
            )


def reached(
    targets: Mapping[str, Sequence[float]], rounds: Sequence[Mapping[str, Any]], declared: Declared = None
) -> list[Reached]:
    """Return the cost of each target from the rows of the journal; only evaluated rounds count.

    `declared`: the metrics that the model declares as better when lower.
    """
    return [_first(rounds, metric, value, declared) for metric, values in targets.items() for value in values]


def _first(rounds: Sequence[Mapping[str, Any]], metric: str, value: float, declared: Declared) -> Reached:
    measured = (row for row in rounds if row.get(metric) is not None)
    row = next((row for row in measured if reaches(metric, row[metric], value, declared)), None)
    spent = {} if row is None else row
    return Reached(
        metric=metric,
        value=value,
        simulated_seconds_to=spent.get("simulated_seconds"),
        uplink_bits_to=spent.get("total_uplink_bits"),
        total_bits_to=spent.get("total_bits"),
        rounds_to=spent.get("round"),
    )


def as_metrics(targets: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the `targets` of `result.json` as single numbers, such as `rounds_to.test.accuracy.0.8`, without nulls.

    MLflow's pages make a section of what is before a slash, so there is none.
    """
    return {
        f"{cost}.{target.metric}.{target.value:g}": spent
        for target in map(Reached.model_validate, targets)
        for cost in ("simulated_seconds_to", "uplink_bits_to", "total_bits_to", "rounds_to")
        if (spent := getattr(target, cost)) is not None
    }
