"""What exists: kind -> class. To add one, write its file and add its line; the contract tests pick it up from here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from narrowcast.algorithms.federated.colr import CoLR
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.algorithms.federated.scolr import SCoLR
from narrowcast.cluster.fleet import LogNormalFleet, Tiers, TraceFleet
from narrowcast.cluster.runtime import RayRuntime
from narrowcast.platform.data.movielens import MovieLens1M, MovieLens100K, MovieLensLatestSmall
from narrowcast.platform.data.ncf import NCF
from narrowcast.platform.in_process import LocalRuntime
from narrowcast.platform.models.matrix_factorisation import MatrixFactorisation

Kinds = Mapping[str, type[BaseModel]]

ALGORITHMS: Kinds = {"fedmf": FedMF, "colr": CoLR, "scolr": SCoLR}
MODELS: Kinds = {"matrix_factorisation": MatrixFactorisation}
DATA: Kinds = {
    "ml-100k": MovieLens100K,
    "ml-1m": MovieLens1M,
    "ml-latest-small": MovieLensLatestSmall,
    "ncf": NCF,
}
FLEETS: Kinds = {"tiers": Tiers, "lognormal": LogNormalFleet, "trace": TraceFleet}
RUNTIMES: Kinds = {"local": LocalRuntime, "ray": RayRuntime}

TRAINING_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ml-100k": {"learning_rate": 0.5, "batch_size": 64, "weight_decay": 5e-4, "epochs": 2},
    "ml-1m": {"learning_rate": 0.5, "batch_size": 256, "weight_decay": 5e-4, "epochs": 2},
    "ml-latest-small": {"learning_rate": 0.5, "batch_size": 64, "weight_decay": 5e-4, "epochs": 2},
}
"""Local training per data set. ml-1m: the code released with CoLR (Nguyen et al., WWW 2024)."""
