"""The registry of codec stages, and the type of a field that takes a chain of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from narrowcast.algorithms.codecs.chain import check_order
from narrowcast.algorithms.codecs.stage import Stage
from narrowcast.platform.errors import UserError
from narrowcast.platform.kinds import Registry

STAGES = Registry(
    "codec",
    Stage,
    {
        "error_feedback": "algorithms.codecs.error_feedback:ErrorFeedback",
        "basis": "algorithms.codecs.basis:Basis",
        "svd": "algorithms.codecs.svd:SVD",
        "power_sgd": "algorithms.codecs.power_sgd:PowerSGD",
        "atomo": "algorithms.codecs.atomo:Atomo",
        "top_k": "algorithms.codecs.topk:TopK",
        "random_k": "algorithms.codecs.random_k:RandomK",
        "rotate": "algorithms.codecs.rotation:Rotate",
        "quantise": "algorithms.codecs.quantise:Quantise",
        "eden": "algorithms.codecs.eden:Eden",
        "cast": "algorithms.codecs.cast:Cast",
        "entropy": "algorithms.codecs.entropy:Entropy",
    },
)


def _listed(value: Any) -> Any:
    """Accept a single stage as a chain of one."""
    return [value] if isinstance(value, str | Mapping) else value


def _in_order(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    check_order(stages)
    return stages


def refuse_stateful(codec: Sequence[Stage], reason: str, field: str = "codec") -> None:
    """Raise `UserError` with a reason and advice for a codec with a stage that keeps state between rounds."""
    if stateful := [stage.kind for stage in codec if stage.remembers]:
        raise UserError(f"algorithm.{field} has {stateful[0]}, which keeps state between rounds, but {reason}")


Stages = Annotated[
    tuple[Annotated[Stage, STAGES], ...],
    BeforeValidator(_listed, json_schema_input_type=Annotated[Stage, STAGES] | tuple[Annotated[Stage, STAGES], ...]),
    AfterValidator(_in_order),
    Field(description="chain of codec stages for uploads; an empty one sends the values themselves"),
]
