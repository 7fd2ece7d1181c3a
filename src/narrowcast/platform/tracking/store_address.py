"""The address of the tracking store, and its form without secrets; importing this does not import MLflow."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

HIDDEN = "***"


class Tracking(BaseModel):
    """The tracking store: `uri`, else MLFLOW_TRACKING_URI, else an SQLite file in the output folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str | None = None
    experiment: str = Field("narrowcast", min_length=1, description="the MLflow experiment that runs go to")
    system_metrics: bool = True
    flush_seconds: float = Field(30.0, ge=0, description="wait at the end for a store that lags or is down")

    def resolve(self, output: Path) -> str:
        """Return the tracking URI in force."""
        return self.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{output.resolve()}/mlflow.db"

    def without_secrets(self) -> Tracking:
        """Return a copy without user and password in the URI."""
        return self.model_copy(update={"uri": hide_password(self.uri) if self.uri else None})


def hide_password(uri: str) -> str:
    """Return the URI, or a text with URIs, with `***` in place of users and passwords."""
    shown = re.sub(r"//[^/?#\s]*@", f"//{HIDDEN}@", uri)
    return re.sub(r"(password=)[^&\s]*", rf"\1{HIDDEN}", shown)


def is_hidden(uri: str) -> bool:
    """Return whether `hide_password` has removed something from the URI."""
    return f"//{HIDDEN}@" in uri
