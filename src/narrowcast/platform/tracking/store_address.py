"""The address of the tracking store, and its form without secrets; importing this does not import MLflow."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field

from narrowcast.platform.redaction import hide_secrets
from narrowcast.platform.section import Section


class Tracking(Section):
    """The tracking store: `uri`, else MLFLOW_TRACKING_URI, else an SQLite file in the output folder."""

    uri: str | None = Field(
        None, description="MLflow tracking URI; null: MLFLOW_TRACKING_URI, else mlflow.db in the output folder"
    )
    experiment: str = Field("narrowcast", min_length=1, description="name of the MLflow experiment")
    system_metrics: bool = Field(True, description="record the use of CPU, memory, disk and network")
    flush_seconds: float = Field(
        30.0, ge=0, description="longest wait, after the last round, for a store that lags or is down"
    )

    def resolve(self, output: Path) -> str:
        """Return the tracking URI in force."""
        return self.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{output.resolve()}/mlflow.db"

    def without_secrets(self) -> Tracking:
        """Return a copy without the password in the URI."""
        return self.model_copy(update={"uri": hide_secrets(self.uri) if self.uri else None})
