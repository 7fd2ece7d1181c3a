"""Translation of algorithms of version 0.1: `basis: own`, and `kind: median`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

_RANKS = {"colr": 4, "scolr": 8}
_KEPT = ("codec", "server_learning_rate")
_MOST_ERROR = 3.0  # the coarsest rounding that version 0.1 knew


def translate_earlier_algorithm(values: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return an experiment's values with an algorithm of version 0.1 as it is called now.

    CoLR or SCoLR in `basis: own` is `adaptive_svd` or `adaptive_atomo`; `median` is FedAvg with an aggregator. Other
    values are returned as they are; otherwise a warning has the new name.
    """
    former = values.get("algorithm")
    if former == "median" or (isinstance(former, Mapping) and former.get("kind") == "median"):
        fields = former if isinstance(former, Mapping) else {}
        logger.warning("%s: algorithm.kind = median is now algorithm.kind = fedavg with aggregator = median", origin)
        return {**values, "algorithm": {**fields, "kind": "fedavg", "aggregator": "median"}}
    if not isinstance(former, Mapping) or former.get("basis") != "own" or former.get("kind") not in _RANKS:
        return values
    model = values.get("model", "matrix_factorisation")
    factorises = (model.get("kind") if isinstance(model, Mapping) else model) == "matrix_factorisation"
    algorithm = {
        "kind": "adaptive_svd" if factorises else "adaptive_atomo",
        "rank": former.get("rank", _RANKS[former["kind"]]),
        **{key: former[key] for key in _KEPT if key in former},
    }
    if "codec" not in former:
        algorithm["codec"] = []
    if factorises:
        algorithm["most_error"] = _MOST_ERROR
        policy = former.get("rank_policy", "uniform")
        chosen = policy.get("kind") if isinstance(policy, Mapping) else policy
        algorithm["informs_allocation"] = former["kind"] == "scolr" and chosen == "channel"
        if "aggregation" in former:
            algorithm["aggregation"] = former["aggregation"]
    logger.warning("%s: algorithm.basis = own is now algorithm.kind = %s", origin, algorithm["kind"])
    return {**values, "algorithm": algorithm}
