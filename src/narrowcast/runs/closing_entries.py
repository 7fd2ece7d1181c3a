"""The tags and metrics that a finished run is closed with in MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowcast.platform.tracking.targets import as_metrics
from narrowcast.runs.solve_outputs import target_metrics


def closing_entries(result: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, float]]:
    """Return the sha256 of the model or answer, and the costs of the targets, from the content of `result.json`."""
    if "answer_sha256" in result:
        return {"answer_sha256": result["answer_sha256"]}, target_metrics(result["targets"])
    return {"model_sha256": result["model_sha256"]}, as_metrics(result["targets"])
