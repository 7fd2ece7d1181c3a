"""Text fields with a pattern, which an error states in words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


@dataclass(frozen=True)
class Matches:
    """Annotation of a text field: the whole text has to match `pattern`; `words` go on from the value in an error."""

    pattern: str
    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "pattern": f"^({self.pattern})$"}

    def _check(self, value: str) -> str:
        if re.fullmatch(self.pattern, value) is None:
            raise PydanticCustomError("no_match", "{words}", {"words": self.words})
        return value


Name = Annotated[
    str,
    Matches(
        r"[A-Za-z0-9][\w.-]*",
        "should begin with a letter or digit, and have only letters, digits, '.', '_' and '-'",
    ),
]
"""A name of a run or study, and of its folder."""

Factory = Annotated[str, Matches(r"[\w.]+:\w+", "should be package.module:name, such as my_models:make")]
"""The import path of a function."""
