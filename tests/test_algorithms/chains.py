"""Codecs that the tests run over: every kind of the catalog, alone and in the chains that are meant to be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.stages import Stages

Array = NDArray[Any]
_FIELD = TypeAdapter(Stages)


def codec(*stages: Any) -> Codec:
    return Codec(_FIELD.validate_python(list(stages)))


def quantise(**fields: Any) -> dict[str, Any]:
    return {"kind": "quantise", **fields}


def shapes_of(tensors: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: values.shape for name, values in tensors.items()}


def round_trip(chain: Codec, tensors: Mapping[str, Array], key: int) -> dict[str, Array]:
    return dict(chain.decode(chain.encode(tensors, key).to_bytes(), shapes_of(tensors), key))


def error(chain: Codec, tensors: Mapping[str, Array], key: int) -> float:
    """The squared error of one round trip over the squared norm."""
    back = round_trip(chain, tensors, key)
    lost = sum(float(((back[name] - values).astype(np.float64) ** 2).sum()) for name, values in tensors.items())
    return lost / sum(float((values.astype(np.float64) ** 2).sum()) for values in tensors.values())


CHAINS: dict[str, Codec] = {
    "float32": codec(),
    "float32 cast": codec({"kind": "cast", "dtype": "float32"}),
    "float16": codec("cast"),
    "bfloat16": codec({"kind": "cast", "dtype": "bfloat16"}),
    "report": codec("quantise"),
    "k = 1": codec(quantise(levels=1)),
    "k = 1, coded": codec(quantise(levels=1), "entropy"),
    "rows": codec(quantise(norms="row", norm_type="bfloat16"), "entropy"),
    "columns": codec(quantise(norms="column", scale="max")),
    "blocks": codec(quantise(norms=5, rounding="nearest", levels=100), "entropy"),
    "most levels": codec(quantise(levels=2**15, scale="max"), "entropy"),
    "dithered": codec(quantise(rounding="dithered", scale="max", levels=2), "entropy"),
    "rotated": codec({"kind": "rotate", "block": 16}, quantise(norms="row"), "entropy"),
    "rotated once": codec({"kind": "rotate", "passes": 1}),
    "DRIVE": codec("eden"),
    "EDEN": codec({"kind": "eden", "levels": 4, "block": 32}),
    "EDEN, coded": codec({"kind": "eden", "levels": 11, "scale": "min_mse"}, "entropy"),
    "Top-K": codec({"kind": "top_k", "fraction": 0.1}),
    "Top-K as released": codec({"kind": "top_k", "fraction": 1 / 64, "indices": "int32"}),
    "Top-K, coded": codec({"kind": "top_k", "count": 7}, quantise(scale="max"), "entropy"),
    "SVD": codec({"kind": "svd", "rank": 2}),
    "SVD as released": codec({"kind": "svd", "rank": 1, "parts": "usv"}),
    "SVD, coded": codec({"kind": "svd", "rank": 1}, quantise(norms="column", scale="max"), "entropy"),
    "PowerSGD": codec("error_feedback", {"kind": "power_sgd", "rank": 1}),
    "PowerSGD, half": codec("error_feedback", {"kind": "power_sgd", "rank": 2}, "cast"),
    "ATOMO": codec({"kind": "atomo", "rank": 3, "fraction": 0.5}),
    "ATOMO, coded": codec({"kind": "atomo"}, quantise(norms="column", rounding="dithered"), "entropy"),
    "basis": codec({"kind": "basis", "rank": 2}),
    "projected": codec("error_feedback", {"kind": "basis", "rank": 1, "scale": "projection"}, quantise(), "entropy"),
    "remembered Top-K": codec("error_feedback", {"kind": "top_k", "fraction": 0.2}, "cast"),
    "remembered levels": codec("error_feedback", quantise(levels=3, rounding="nearest", scale="max"), "entropy"),
}
"""Chains by what they are called in the tests' names."""

EXACT = {
    name for name, chain in CHAINS.items() if not {stage.kind for stage in chain.stages} & {"entropy", "top_k", "atomo"}
} | {"Top-K as released"}
"""Those whose updates weigh the same whatever they hold and whichever key they have."""
