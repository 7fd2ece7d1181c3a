"""The registry of codec stages, and the type of a field that takes a chain of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from narrowcast.algorithms.codecs.atomo import Atomo
from narrowcast.algorithms.codecs.basis import Basis
from narrowcast.algorithms.codecs.cast import Cast
from narrowcast.algorithms.codecs.chain import check_order
from narrowcast.algorithms.codecs.eden import Eden
from narrowcast.algorithms.codecs.entropy import Entropy
from narrowcast.algorithms.codecs.error_feedback import ErrorFeedback
from narrowcast.algorithms.codecs.power_sgd import PowerSGD
from narrowcast.algorithms.codecs.quantise import Quantise
from narrowcast.algorithms.codecs.random_k import RandomK
from narrowcast.algorithms.codecs.rotation import Rotate
from narrowcast.algorithms.codecs.stage import Stage
from narrowcast.algorithms.codecs.svd import SVD
from narrowcast.algorithms.codecs.topk import TopK
from narrowcast.platform.kinds import Registry

STAGES = Registry(
    "codec",
    Stage,
    {
        "error_feedback": ErrorFeedback,
        "basis": Basis,
        "svd": SVD,
        "power_sgd": PowerSGD,
        "atomo": Atomo,
        "top_k": TopK,
        "random_k": RandomK,
        "rotate": Rotate,
        "quantise": Quantise,
        "eden": Eden,
        "cast": Cast,
        "entropy": Entropy,
    },
)


def _listed(value: Any) -> Any:
    """Accept a single stage as a chain of one."""
    return [value] if isinstance(value, str | Mapping) else value


def _in_order(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    check_order(stages)
    return stages


Stages = Annotated[
    tuple[Annotated[Stage, STAGES], ...],
    BeforeValidator(_listed, json_schema_input_type=Annotated[Stage, STAGES] | tuple[Annotated[Stage, STAGES], ...]),
    AfterValidator(_in_order),
    Field(description="chain of codec stages for uploads; an empty one sends the values themselves"),
]
