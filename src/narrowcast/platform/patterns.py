"""Text fields with a pattern, which an error states in words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
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


Factory = Annotated[str, Matches(r"[\w.]+:\w+", "should be package.module:name, such as my_models:make")]
"""The import path of a function."""
