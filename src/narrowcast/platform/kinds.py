"""Fields whose `kind` picks the class of their value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Union

from pydantic import BaseModel, BeforeValidator, Field

KIND_ALONE = BeforeValidator(lambda value: {"kind": value} if isinstance(value, str) else value)
"""The kind alone, as a string, stands for that kind with its defaults."""


def one_of(kinds: Mapping[str, type[BaseModel]]) -> Any:
    """The type of a field that takes any of these kinds."""
    classes = tuple(kinds.values())
    union = Annotated[Union[classes], Field(discriminator="kind")] if len(classes) > 1 else classes[0]  # noqa: UP007
    return Annotated[union, KIND_ALONE]
