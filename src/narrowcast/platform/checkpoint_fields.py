"""The fields about checkpoints, which every kind of run has."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from narrowcast.platform.disk import expand_home
from narrowcast.platform.field_roles import Role
from narrowcast.platform.redaction import hide_secrets

_KEPT = Role(identity=False, not_tuned="it does not affect a run")


def _lasting_place_without_password(value: str | None) -> str | None:
    if value is None or "://" not in value:
        return value and str(expand_home(value).absolute())
    if hide_secrets(value) != value:
        raise ValueError("names a user or password, which would be written down; give them in the environment")
    return value.rstrip("/")


CheckpointEvery = Annotated[
    int | None, _KEPT, Field(ge=1, description="interval of checkpoints, besides checkpoint_seconds")
]
CheckpointSeconds = Annotated[
    float, _KEPT, Field(ge=0, description="wall time between checkpoints; the end of the run has one")
]
CheckpointsKept = Annotated[int, _KEPT, Field(ge=1, description="number of checkpoints kept, the latest ones")]
CheckpointPath = Annotated[
    str | None,
    _KEPT,
    AfterValidator(_lasting_place_without_password),
    Field(description="folder of the checkpoints, or fsspec URL; null: in the run's folder"),
]
