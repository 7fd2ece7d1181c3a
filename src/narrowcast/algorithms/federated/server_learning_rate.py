"""The field that all algorithms with a server step of their own share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

ServerLearningRate = Annotated[
    float,
    Field(gt=0, description="factor of the mean update in the server's step; below 1 damps what few clients send"),
]
