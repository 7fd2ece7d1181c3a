"""Roles of an experiment's fields in its identity, in replicas and in studies, as metadata of the fields."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel


@dataclass(frozen=True)
class Role:
    """Stands in a field's `Annotated` type. A field without one affects results, may differ and can be tuned."""

    identity: bool = True
    """True if the results of a round depend on the field."""
    shared: bool = False
    """True if replicas have the field in common."""
    not_tuned: str | None = None
    """Why a study cannot vary the field."""


def role_of(model: type[BaseModel], name: str) -> Role:
    """Return the role of a field; the default for names that are none."""
    field = model.model_fields.get(name)
    return next((each for each in field.metadata if isinstance(each, Role)), Role()) if field else Role()
