"""The small runs of which histories are made."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from narrowcast.experiment import Experiment
from narrowcast.laws.small_tasks import interactions, samples
from narrowcast.platform.data.dataset import DataSource
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.data.samples import Samples

_COUNTS = np.random.default_rng(1).integers(1, 12, 8)
_RATED, _DRAWN = interactions(_COUNTS), samples(_COUNTS)


class _Tiny(DataSource, BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    seed: int = 0


class TinyRatings(_Tiny):
    kind: Literal["tiny_ratings"] = "tiny_ratings"

    def load(self) -> Interactions:
        return _RATED


class TinyImages(_Tiny):
    kind: Literal["tiny_images"] = "tiny_images"

    def load(self) -> Samples:
        return _DRAWN


_RATINGS = {
    "data": {"kind": "workloads:TinyRatings"},
    "model": {"kind": "matrix_factorisation", "embedding_dim": 4},
    "training": {"kind": "factorisation_sgd", "epochs": 1},
}
_IMAGES = {
    "data": {"kind": "workloads:TinyImages"},
    "model": {"kind": "softmax"},
    "training": {"kind": "sgd", "epochs": 1, "batch_size": 16},
}
_LOCAL, _RAY = {"kind": "local"}, {"kind": "ray", "actors": 2, "cpus_per_actor": 1}
WORKLOADS: Mapping[str, Mapping[str, Any]] = {
    "scolr": {**_RATINGS, "algorithm": {"kind": "scolr", "rank": 2}, "backend": _LOCAL},
    "scolr on ray": {
        **_RATINGS,
        "algorithm": {"kind": "scolr", "rank": 2},
        "backend": _RAY,
        "evaluate_clients": ["test", "validation"],
    },
    "fedavg": {**_IMAGES, "algorithm": {"kind": "fedavg"}, "backend": _LOCAL, "rounds": 14},
    "scaffold": {**_IMAGES, "algorithm": {"kind": "scaffold"}, "backend": _LOCAL, "evaluate_clients": ["train"]},
    "scaffold on ray": {**_IMAGES, "algorithm": {"kind": "scaffold"}, "backend": _RAY, "chunk_size": 1},
    "buffered": {
        **_IMAGES,
        "algorithm": {"kind": "fedavg"},
        "backend": _LOCAL,
        "schedule": {"kind": "buffered", "buffer_size": 2, "concurrency": 3},
    },
    "masked on ray": {
        **_RATINGS,
        "algorithm": {"kind": "scolr", "rank": 2},
        "secure": {"kind": "masked"},
        "backend": _RAY,
        "rounds": 6,
    },
}
_SHARED = {
    "name": "run",
    "rounds": 8,
    "clients_per_round": 4,
    "chunk_size": 2,
    "evaluate_every": 4,
    "tracking": {"system_metrics": False, "flush_seconds": 10},
}


@cache
def experiment_of(workload: str) -> Experiment:
    return Experiment(**{**_SHARED, **WORKLOADS[workload]})
