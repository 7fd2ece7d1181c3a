"""Fields whose `kind` picks the class of their value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Union

from pydantic import BaseModel, BeforeValidator, Field


def kind_alone(default: str | None = None) -> BeforeValidator:
    """Let a string stand for that kind with its defaults, and a section without a kind for the default kind."""

    def read(value: Any) -> Any:
        if isinstance(value, str):
            return {"kind": value}
        if default and isinstance(value, Mapping) and "kind" not in value:
            return {"kind": default, **value}
        return value

    return BeforeValidator(read)


def one_of(kinds: Mapping[str, type[BaseModel]], default: str | None = None) -> Any:
    """The type of a field that takes any of these kinds."""
    classes = tuple(kinds.values())
    union = Annotated[Union[classes], Field(discriminator="kind")] if len(classes) > 1 else classes[0]  # noqa: UP007
    return Annotated[union, kind_alone(default)]
