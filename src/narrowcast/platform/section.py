"""The base of the classes that experiments are made of, whose objects made in Python raise the errors of a file."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from narrowcast.platform.config import explained
from narrowcast.platform.errors import UserError


class Section(BaseModel):
    """A frozen model without unknown fields: a wrong field, or an assignment, is one line of `UserError`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            problem = f"{type(self).__name__}: {explained(type(self), error, values, [])}"
        else:
            return
        raise UserError(problem)

    # What pydantic asks for of an __init__ that only wraps its own: sections of a file are validated without it.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise `UserError`: other values need another object."""
        try:
            super().__setattr__(name, value)
        except ValidationError:
            problem = (
                f"{type(self).__name__}.{name} cannot be assigned, since the object is frozen; make another one, or "
                f'give the value as an override, such as nc.run(experiment, {{"rounds": 5}})'
            )
        else:
            return
        raise UserError(problem)
