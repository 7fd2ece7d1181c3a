"""The tags and metrics that a finished run is closed with in MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowcast.platform.tracking.targets import RunTargetCost, SolveTargetCost


def closing_entries(result: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, float]]:
    """Return the sha256 of the model or answer, and the costs of the targets, from the content of `result.json`."""
    name, kind = ("answer_sha256", SolveTargetCost) if "answer_sha256" in result else ("model_sha256", RunTargetCost)
    metrics = [kind.model_validate(each).metrics() for each in result["targets"]]
    return {name: result[name]}, {key: cost for each in metrics for key, cost in each.items()}
