"""What it took a run to reach stated values of its metrics: simulated time, uplink and rounds to each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

from narrowcast.platform.config import flatten, suggest
from narrowcast.platform.errors import UserError


def _by_metric(value: Any) -> Any:
    """`test: {accuracy: 0.8}`, as an override writes it, is `test.accuracy: [0.8]`."""
    if not isinstance(value, Mapping):
        return value
    return {name: each if isinstance(each, list | tuple) else [each] for name, each in flatten(value).items()}


Targets = Annotated[
    dict[str, Annotated[tuple[FiniteFloat, ...], Field(min_length=1)]],
    BeforeValidator(_by_metric),
]
"""The values that each metric, named `split.metric`, should reach."""


class Reached(BaseModel):
    """The cost up to the first evaluation at which a metric was `at_least` so much; None where there was none.

    Units: seconds on the virtual clock and bits, both of the whole run up to that round.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    metric: str
    at_least: float
    simulated_seconds_to: float | None
    uplink_bits_to: int | None
    rounds_to: int | None


def check_targets(targets: Mapping[str, Sequence[float]], known: Iterable[str]) -> None:
    """Raise a `UserError` for a metric that the run does not measure."""
    known = sorted(known)
    for name in targets:
        if name not in known:
            raise UserError(
                f"targets.{name} is no metric of this run; it measures {', '.join(known)}{suggest(name, known)}"
            )


def reached(targets: Mapping[str, Sequence[float]], rounds: Sequence[Mapping[str, Any]]) -> list[Reached]:
    """What each target took, from the rows of the journal; only rounds that were evaluated count."""
    return [_first(rounds, metric, value) for metric, values in targets.items() for value in values]


def _first(rounds: Sequence[Mapping[str, Any]], metric: str, at_least: float) -> Reached:
    row = next((row for row in rounds if row.get(metric) is not None and row[metric] >= at_least), None)
    seconds, bits, number = (row["simulated_seconds"], row["total_uplink_bits"], row["round"]) if row else (None,) * 3
    return Reached(
        metric=metric, at_least=at_least, simulated_seconds_to=seconds, uplink_bits_to=bits, rounds_to=number
    )


def as_metrics(targets: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The rows of `result.json` as single numbers, such as `rounds_to/test.accuracy/0.8`; none for what is None."""
    return {
        f"{cost}/{target['metric']}/{target['at_least']:g}": target[cost]
        for target in targets
        for cost in ("simulated_seconds_to", "uplink_bits_to", "rounds_to")
        if target[cost] is not None
    }
