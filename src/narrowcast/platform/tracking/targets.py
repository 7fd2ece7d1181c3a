"""The cost of reaching stated values of metrics: of a run time, bits and rounds, of a solve iterations and time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

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
        metric, statistic = parted(name)
        bounded = statistic not in (VARIANCE, CLIENTS) and metric.rpartition(".")[2] in shares
        if (highest := max(values)) > 1 and bounded:
            raise UserError(
                f"targets.{name} = {highest:g}: the metric lies between 0 and 1, so no run reaches it; 0.8 is 80 %"
            )


def target_costs(
    kind: type[CostT],
    targets: Mapping[str, Collection[float]],
    rows: Sequence[Mapping[str, Any]],
    declared: Declared = None,
) -> list[CostT]:
    """Return the cost of each target from the rows of the journal; only those that were evaluated count.

    `declared`: the metrics that are declared as better when lower.
    """
    found = []
    for metric, values in targets.items():
        measured = [row for row in rows if row.get(metric) is not None]
        for value in values:
            first = next((row for row in measured if reaches(metric, row[metric], value, declared)), {})
            costs = {name: first.get(column) for name, column in kind.columns.items()}
            found.append(kind(metric=metric, value=value, **costs))
    return found
