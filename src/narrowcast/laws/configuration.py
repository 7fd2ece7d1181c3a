"""Laws of every registry: the object is its configuration."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from io import StringIO
from typing import Annotated, Any

from pydantic import BaseModel, ValidationError, create_model

from narrowcast.laws.law import require
from narrowcast.platform.config.files import plugin_folders, validate
from narrowcast.platform.config.kinds import Registry
from narrowcast.platform.config.yaml import read_yaml, write_yaml
from narrowcast.platform.errors import UserError


@dataclass(frozen=True)
class Configured:
    """An object of a registry."""

    registry: Registry
    value: Any


def pickling_gives_an_equal_object(case: Configured) -> None:
    """Pickle and unpickle the object, as a backend does to reach its workers."""
    back = pickle.loads(pickle.dumps(case.value))
    require(back == case.value, f"it comes back as {back!r}")
    if case.registry.name != "backend":  # the others are keys of what is kept between calls
        require(hash(back) == hash(case.value), "its hash is another")


def a_yaml_round_trip_gives_an_equal_object(case: Configured) -> None:
    """Write the object to YAML under its kind, and read it again."""
    field: Any = (Annotated[Any, case.registry], ...)
    holder: type[BaseModel] = create_model("Holder", part=field)
    written = StringIO()
    write_yaml(holder(part=case.value).model_dump(mode="json"), written)
    back = validate(holder, read_yaml(written.getvalue(), "YAML"), f"{plugin_folders('')[1]}/YAML")
    require(getattr(back, "part") == case.value, f"it comes back as {getattr(back, 'part')!r}")  # noqa: B009 - made above


def an_unknown_field_is_refused(case: Configured) -> None:
    """Give the class a field that it does not have."""
    try:
        type(case.value).model_validate({**case.value.model_dump(), "no_such_field": 1})
    except ValidationError:
        return
    require(condition=False, reason="no_such_field was taken")


def fields_cannot_be_changed(case: Configured) -> None:
    """Assign a field of the object."""
    try:
        case.value.kind = "other"
    except (UserError, ValidationError, AttributeError, TypeError):
        return
    require(condition=False, reason="kind was assigned")


def the_class_has_a_docstring(case: Configured) -> None:
    """Read the docstring of the class."""
    require(type(case.value).__doc__, "it has no docstring")


LAWS = (
    pickling_gives_an_equal_object,
    a_yaml_round_trip_gives_an_equal_object,
    an_unknown_field_is_refused,
    fields_cannot_be_changed,
    the_class_has_a_docstring,
)
