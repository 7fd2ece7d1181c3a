"""Annotations of an experiment's fields: patterns of text, units, and roles.

A pattern comes with the words of its error. The unit of a field is known from the end of its name or from its metadata;
the reference and the JSON Schema show it. The role of a field says whether it belongs to the identity of a run, and
what it means for replicas and for studies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.config import JsonDict
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from narrowcast.platform.errors import UserError, shown


@dataclass(frozen=True)
class Matches:
    """Annotation of a text field: the whole text has to match `pattern`; `words` go on from the value in an error."""

    pattern: str
    words: str
    most_bytes: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "pattern": f"^({self.pattern})$"}

    def problem(self, value: str) -> str:
        """Return what is wrong with a text, empty if nothing is."""
        if self.most_bytes is not None and len(value.encode(errors="replace")) > self.most_bytes:
            return f"should have at most {self.most_bytes} bytes"
        return "" if re.fullmatch(self.pattern, value) else self.words

    def _check(self, value: str) -> str:
        if words := self.problem(value):
            raise PydanticCustomError("no_match", "{words}", {"words": words})
        return value


_LONGEST_NAME = 200  # bytes; file systems take 255, and endings are added
_FILE_NAME = Matches(
    r"[A-Za-z0-9][\w.-]*",
    "should begin with a letter or digit, and have only letters, digits, '.', '_' and '-'",
    _LONGEST_NAME,
)

Name = Annotated[str, _FILE_NAME]
"""A name of a run or study, and of its folder."""


def check_name(value: str, what: str) -> str:
    """Return a text that becomes the name of a file; raise `UserError`, with what it names, if it cannot be one."""
    if words := _FILE_NAME.problem(value):
        raise UserError(f"{what} = {shown(value)}: {words}")
    return value


BITS: Final[JsonDict] = {"unit": "bit"}
ITERATIONS: Final[JsonDict] = {"unit": "iterations"}
METRES: Final[JsonDict] = {"unit": "m"}
ROUNDS: Final[JsonDict] = {"unit": "rounds"}
SECONDS: Final[JsonDict] = {"unit": "s"}

_BY_ENDING = {
    "mbit_per_second": "Mbit/s",
    "bits_per_second": "bit/s",
    "seconds_per_example": "s/example",
    "seconds": "s",
    "bits": "bit",
    "decibel": "dB",
    "hertz": "Hz",
}


def unit_of(name: str, schema: Mapping[str, Any]) -> str:
    """Return the unit of a field with this JSON Schema, empty for counts, ratios and what is not a quantity."""
    if "unit" in schema:
        return str(schema["unit"])
    return next((unit for ending, unit in _BY_ENDING.items() if name == ending or name.endswith(f"_{ending}")), "")


@dataclass(frozen=True)
class Role:
    """The role of a field in the identity of an experiment, in replicas and in studies.

    It stands in the field's `Annotated` type. A field without one affects results, may differ and can be tuned.
    """

    identity: bool = True
    """True if the results of a round depend on the field."""
    shared: bool = False
    """True if replicas have the field in common."""
    not_tuned: str | None = None
    """The reason why a study cannot vary the field."""


def role_of(model: type[BaseModel], name: str) -> Role:
    """Return the role of a field; the default for names that are not a role."""
    field = model.model_fields.get(name)
    return next((metadata for metadata in field.metadata if isinstance(metadata, Role)), Role()) if field else Role()
