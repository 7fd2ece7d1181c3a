"""Dotted overrides: `a.b=value` set in nested values, also in lists and in the defaults of sections left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from narrowcast.platform.config import inside, models_in, read_yaml, registries_in
from narrowcast.platform.errors import UserError
from narrowcast.platform.kinds import Registry, optional


@dataclass(frozen=True)
class Defaults:
    """The defaults of a model, of which an override may change a part.

    Kinds such as `package.module:Class` are imported from `folders`. `kinds` returns the kinds of sections that name
    none, where they depend on the other values.
    """

    model: type[BaseModel]
    folders: Sequence[Any] = ()
    kinds: Callable[[Any], Mapping[str, str]] = lambda _: {}

    def at(self, values: Any, keys: Sequence[str]) -> Any:
        """Return plain values of the default at these keys of the nested values, None if there is none.

        Of a section, only the fields that differ from the defaults of its class: validation fills in the others.
        """
        field = self._field(values, keys)
        if field is None or field.is_required() or field.default_factory_takes_validated_data:
            return None
        default = field.get_default(call_default_factory=True)
        if field.default_factory and type(default).model_fields.keys() == {"kind"}:
            return {}  # the default depends on the machine and has no fields: one that is set is of the registry's kind
        return _plain(default, _registry(field))

    def kind_at(self, values: Any, keys: Sequence[str]) -> str | None:
        """Return the kind of the section at these keys that names none."""
        if len(keys) == 1 and (kind := self.kinds(values).get(keys[0])) is not None:
            return kind
        field = self._field(values, keys)
        if field is None:
            return None
        default = None if field.default_factory else field.get_default()
        registry = _registry(field)
        return registry.default if registry is not None and registry.default else optional(default, "kind")

    def fields_at(self, values: Any, keys: Sequence[str], section: Mapping[str, Any]) -> set[str]:
        """Return the fields that a section at these keys may have; those that it has if its class is not known."""
        field = self._field(values, keys)
        registry = None if field is None else _registry(field)
        known = None if registry is None else registry.class_of(section, self.folders)
        return {*(section if known is None else known.model_fields)}

    def is_section(self, values: Any, keys: Sequence[str]) -> bool:
        """Return whether the value at these keys has fields, rather than names of the user's, as `targets` has."""
        field = self._field(values, keys)
        if field is None:
            return False
        return _registry(field) is not None or any(
            each == dict[str, Any] or (isinstance(each, type) and issubclass(each, BaseModel))
            for each in _members(field.annotation)
        )

    def _field(self, values: Any, keys: Sequence[str]) -> FieldInfo | None:
        """Return the field that the last key names in the section before it, None if that is not known."""
        owner: type[BaseModel] | None = self.model
        registry: Registry | None = None
        kinds = self.kinds(values)
        for depth, key in enumerate(keys[:-1]):
            values = inside(values, int(key) if isinstance(values, list) else key)
            if not depth and key in kinds and (values is None or isinstance(values, dict)):
                values = {"kind": kinds[key], **(values or {})}
            if owner is not None and (field := owner.model_fields.get(key)) is not None:
                registry = _registry(field)
                owner = next(iter(models_in(field.annotation)), None)
            if registry is not None:
                owner = registry.class_of(values, self.folders)
        return None if owner is None else owner.model_fields.get(keys[-1])


def _registry(field: FieldInfo) -> Registry | None:
    return next(registries_in(field.annotation, field.metadata), None)


def _members(annotation: Any) -> Iterator[Any]:
    """Yield a type, or the alternatives of a union, but nothing from inside lists and mappings."""
    if get_origin(annotation) in (Union, UnionType, Annotated):
        for each in get_args(annotation):
            yield from _members(each)
    else:
        yield annotation


def _plain(default: Any, registry: Registry | None) -> Any:
    if isinstance(default, tuple | list):
        return [_plain(each, registry) if isinstance(each, BaseModel) else deepcopy(each) for each in default]
    if not isinstance(default, BaseModel):
        return deepcopy(default) if isinstance(default, dict) else None
    values = default.model_dump(mode="json", exclude_defaults=True, exclude={"kind"})
    if registry is None or (kind := registry.kind_of(default)) == registry.default:
        return values
    return {"kind": kind, **values}


def apply_overrides(
    values: dict[str, Any], overrides: Iterable[str], defaults: Defaults | None = None
) -> dict[str, Any]:
    """Set `a.b=value` items in nested values; the value is read as YAML.

    A mapping sets the fields that it has in its section. Another `kind`, and an empty mapping, start a section over.
    """
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not all(path.split(".")):
            raise UserError(f'"{override}" is not an override; write a.b=value, such as algorithm.rank=8')
        _override(values, path, read_yaml(text, f"override {path}"), defaults)
    return values


def _override(values: dict[str, Any], path: str, value: Any, defaults: Defaults | None) -> None:
    if defaults is not None and isinstance(value, Mapping) and _is_of_section(values, path.split("."), value, defaults):
        for key in sorted(value, key=lambda name: name != "kind"):
            _override(values, f"{path}.{key}", value[key], defaults)
    else:
        set_value(values, path, value, defaults)


def _is_of_section(values: Any, keys: Sequence[str], value: Mapping[str, Any], defaults: Defaults) -> bool:
    """Return whether a mapping has fields of the section at these keys, rather than those of another in its place."""
    present = values
    for key in keys:
        if isinstance(present, list) and not (key.isdecimal() and int(key) < len(present)):
            return False
        present = inside(present, int(key) if isinstance(present, list) else key)
    if not value or isinstance(present, list) or not defaults.is_section(values, keys):
        return False
    if present is None and isinstance(defaults.at(values, keys), list):
        return False  # the mapping stands for a list of one
    if "kind" not in value:
        return True
    section: dict[str, Any] = {"kind": present} if isinstance(present, str) else present or {}
    if value["kind"] != section.get("kind", defaults.kind_at(values, keys)):
        return False
    # A section that names no kind may have been written for another data set, and so for another kind.
    return section.keys() - {"kind"} <= defaults.fields_at(values, keys, section | {"kind": value["kind"]})


def set_value(values: Any, path: str, value: Any, defaults: Defaults | None = None) -> None:
    """Set the value at a dotted path in nested values, in place.

    A section that is left out starts from its default. A place in a list is its number; the number after the last one
    appends, and a section that stands for a list of one is its place 0.
    """
    root, keys = values, path.split(".")
    for depth, key in enumerate(keys[:-1]):
        place = _place(values, key, path)
        present = inside(values, place) if isinstance(values, dict) or place < len(values) else None
        following = keys[depth + 1]
        if isinstance(present, str):
            present = {"kind": present}
        if not isinstance(present, dict | list):
            found = None if defaults is None else defaults.at(root, keys[: depth + 1])
            present = found if isinstance(found, dict | list) else {}
        if isinstance(present, dict) and following.isdecimal() and "kind" in present:
            present = [present]
        _set(values, place, present)
        values = present
    place = _place(values, keys[-1], path)
    if place == "kind" and values.get("kind", value) != value:
        values.clear()  # the fields of one kind mean nothing to another
    _set(values, place, value)


def _set(values: Any, place: Any, value: Any) -> None:
    if isinstance(values, list) and place == len(values):
        values.append(value)
    else:
        values[place] = value


def _place(values: Any, key: str, path: str) -> Any:
    """Return the key of a section, or the number of a place in a list or just behind it."""
    if not isinstance(values, list):
        return key
    if not key.isdecimal() or int(key) > len(values):
        raise UserError(
            f'override {path}: "{key}" is not an element of a list of {len(values)}; use '
            + (f"0 to {len(values) - 1}, or {len(values)} to append" if values else "0 to append the first")
        )
    return int(key)
