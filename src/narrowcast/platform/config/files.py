"""Settings as frozen sections: validated, overridden by dotted paths, with errors that name the path.

`Section` is the base of the classes that experiments are made of; objects made in Python raise the errors of a file.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticSerializationError

from narrowcast.platform.config.kinds import FOLDERS, Registry, kind_in
from narrowcast.platform.config.redaction import check_address, redact, redact_values
from narrowcast.platform.config.yaml import read_yaml
from narrowcast.platform.errors import UserError

ModelT = TypeVar("ModelT", bound=BaseModel)
PLUGINS = "plugins"
"""The folder, beside a run's config.yaml, of the modules that its own classes come from."""
MODEL = "model.safetensors"
"""The file of a finished run with its global model."""
FROZEN = "frozen.sha256"
"""The sha256 of what no client trains in a run's model, before its result has it."""
START = "start.safetensors"
"""A copy of the model that a run starts from, which it is resumed and verified with."""
_ERRORS_SHOWN = 4
_MAY_HOLD_A_PASSWORD = ("tracking.uri", "study.storage")
_LARGEST = 3.4e38
_LONGEST_SECTION = 60
"""Characters of a section that an error shows."""
_MOST_SHOWN = 200
"""Characters of a wrong value that an error shows."""
_FIRST_WORDS = re.compile(r"^(Value error, |(Input|String|List|Tuple|Dictionary|Value|Data) (?=should))")
_SHOULD = {
    **dict.fromkeys(("tuple_type", "list_type", "set_type", "frozen_set_type"), "should be a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type", "mapping_type"), "should be a mapping"),
    "path_type": "should be a path",
}
"""By pydantic's type of an error, in the words of YAML."""


def validate(model: type[ModelT], values: Any, origin: str) -> ModelT:
    """Build the model of settings, or raise one `UserError` that says for each bad value what was got and is allowed.

    Kinds such as `package.module:Class` are imported from the folder of the file that `origin` names, from `plugins` in
    it, and from the current directory.
    """
    valid = validate_result(model, values, origin)
    dumped = valid.model_dump()
    _refuse_secrets(dumped, origin)
    _refuse_truth_values(values, dumped, f"{origin}: ")
    for path, value in flatten(dumped).items():
        if isinstance(value, float) and not math.isfinite(value):  # JSON has no such numbers
            raise UserError(f"{origin}: {path} = {value}: should be a finite number")
        if isinstance(value, float) and abs(value) > _LARGEST:
            raise UserError(f"{origin}: {path} = {value:g}: should be at most {_LARGEST:g}, as in float32")
    return valid


def validate_result(model: type[ModelT], values: Any, origin: str) -> ModelT:
    """Build the model of a file that a run wrote, as `validate` does, whatever sizes its numbers have.

    What was measured of a diverging run may be larger than any setting, and not finite.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{origin}: {not_a_mapping(values)}")
    _refuse_secrets(values, origin)
    try:
        return model.model_validate(values, context={FOLDERS: plugin_folders(origin)})
    except ValidationError as error:
        raise UserError(f"{origin}: {explained(model, error, values, plugin_folders(origin))}") from error


def not_a_mapping(values: Any) -> str:
    """Return what is wrong with the top of a file that is not a mapping."""
    if values is None:
        return "the file is empty; give a mapping, with a line KEY: VALUE for each setting"
    return f"should be a mapping at the top, with a line KEY: VALUE for each setting; got {type(values).__name__}"


def explained(model: type[BaseModel], error: ValidationError, values: Any, folders: list[Path]) -> str:
    """Return in one line what is wrong with the values of a model; kinds are imported from the folders."""
    # A misspelt key first: it is why another is missing.
    errors = sorted(_causes(error.errors()), key=lambda problem: problem["type"] != "extra_forbidden")
    problems = _joined([_explain(model, dict(problem), values, folders) for problem in errors])
    more = f" (and {len(problems) - _ERRORS_SHOWN} more)" if len(problems) > _ERRORS_SHOWN else ""
    return "; ".join(problems[:_ERRORS_SHOWN]) + more


def _refuse_secrets(values: Mapping[str, Any], origin: str) -> None:
    """Raise `UserError` for a password in a value that is written down whole, or in an address with two readings."""
    for path, value in flatten(values).items():
        if isinstance(value, str) and path.endswith(_MAY_HOLD_A_PASSWORD):
            check_address(value, f"{origin}: {path}")
        elif repr(shown := redact_values(value)) != repr(value):  # nan differs from itself
            raise UserError(
                f"{origin}: {path} = {shown!r} names a user or password, which would be written down; give them in the "
                "environment, or in a file of the library that needs them"
            )


def _refuse_truth_values(written: Any, read: Any, path: str) -> None:
    """Raise `UserError` for a true or false that was read as the number 1 or 0."""
    if isinstance(written, bool) and isinstance(read, int | float) and not isinstance(read, bool):
        raise UserError(f"{path} = {str(written).lower()}: should be a number")
    pairs: Iterable[tuple[Any, Any, Any]] = ()
    if isinstance(written, Mapping) and isinstance(read, Mapping):
        pairs = ((key, value, read[key]) for key, value in written.items() if key in read)
    elif isinstance(written, list | tuple) and isinstance(read, list | tuple):
        pairs = zip(range(len(written)), written, read, strict=False)
    separator = "" if path.endswith(": ") else "."
    for key, value, of_it in pairs:
        _refuse_truth_values(value, of_it, f"{path}{separator}{key}")


def plugin_folders(origin: str) -> list[Path]:
    """Return the folders in which the modules of an experiment file's own classes are looked for."""
    folder = Path(origin).parent
    return [folder / PLUGINS, folder, Path.cwd()]


def _explain(model: type[BaseModel], problem: dict[str, Any], values: Any, folders: list[Path]) -> str:
    path, owner, registry = _locate(model, problem["loc"], values, folders)
    context = problem.get("ctx", {})
    got = problem["input"]
    match problem["type"]:
        case "extra_forbidden":
            known = sorted(owner.model_fields)
            word = path.split(".")[-1]
            others = [kind for kind, model_of_kind in (registry or {}).items() if word in model_of_kind.model_fields]
            elsewhere = f"; a field of the kind {' and '.join(others)}" if others else ""
            return f"{path} is unknown; known here: {', '.join(known)}{elsewhere or suggest(word, known)}"
        case "union_tag_invalid":
            known = [tag.strip().strip("'") for tag in context["expected_tags"].split(",")]
            tag = context["tag"]
            return f'{path}.kind = "{tag}" is unknown; known: {", ".join(known)}{suggest(tag, known)}'
        case "kind_unknown":
            known, kind = context["known"].split(","), context["kind"]
            return f'{path}.kind = "{kind}" is unknown; known: {", ".join(known)}{suggest(kind, known)}'
        case "kind_refused":
            reason = context["problem"].removeprefix(context["kind"]).removeprefix(" ")
            message = f"{path}.kind = {context['kind']}: {reason}"
        case "union_tag_not_found" | "kind_missing":
            kinds = ", ".join(context.get("known", "").split(",")[:3])
            message = f"{path}.kind is missing; add kind: ..." + (f", such as {kinds}" if kinds else "")
        case "missing":
            message = f"{path} is missing"
        case _:
            reason = _FIRST_WORDS.sub("", _SHOULD.get(problem["type"]) or problem["msg"])
            names_its_field = bool(path) and reason.startswith(f"{path}.")
            message = reason if names_its_field or not path else f"{_with_value(path, got)}: {reason}"
    return message


def _causes(errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Return the errors without those of lists that are too short because an element is wrong."""
    locations = [error["loc"] for error in errors]
    return [
        error
        for error in errors
        if error["type"] != "too_short"
        or not any(location[: len(error["loc"])] == error["loc"] != location for location in locations)
    ]


def _with_value(path: str, got: Any) -> str:
    """Return a path with its wrong value; of a section its kind, since what is wrong is between its fields."""
    if isinstance(kind := kind_in(got), str):
        return f"{path} = {kind}"
    shown = redact(_short(got))
    return path if isinstance(got, Mapping | BaseModel) and len(shown) > _LONGEST_SECTION else f"{path} = {shown}"


def _short(got: Any) -> str:
    shown = json.dumps(got) if got is None or isinstance(got, bool) else repr(got)
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]} ..."


def _joined(problems: list[str]) -> list[str]:
    """Return the problems with those of one value, such as an alternative of a union each, in one."""
    merged: dict[str, str] = {}
    for problem in problems:
        subject, separator, alternative = problem.partition(": should be ")
        merged[subject] = f"{merged[subject]}, or {alternative}" if separator and subject in merged else problem
    return list(merged.values())


def command(*words: object) -> str:
    """Return a command of narrowcast as a shell takes it, paths quoted."""
    return shlex.join(["narrowcast", *map(str, words)])


def suggest(word: str, known: Collection[str]) -> str:
    """The closest known word as a question, or nothing."""
    section, _, last = str(word).rpartition(".")
    # Names of one section are compared without it: test.loss is not like test.f1.
    beside = {name.rpartition(".")[2]: name for name in known if section and name.rpartition(".")[0] == section}
    unused = [name for name in known if name not in beside.values()]
    close = difflib.get_close_matches(last, beside, n=1) or difflib.get_close_matches(str(word), unused, n=1)
    return f'. Did you mean "{beside.get(close[0], close[0])}"?' if close else ""


def _locate(
    model: type[BaseModel], location: tuple[int | str, ...], values: Any, folders: list[Path]
) -> tuple[str, type[BaseModel], Registry | None]:
    """Return the dotted path of an error, without the union tags that pydantic adds, and the model that it is in.

    The third is the registry that this model is of, if any.
    """
    path: list[str] = []
    owner = model
    registry: Registry | None = None
    of_owner: Registry | None = None
    members: dict[str, type[BaseModel]] = {}
    for step in location:
        if str(step) in members and (not path or str(step) not in owner.model_fields):
            owner, members = members[str(step)], {}
            continue
        if not isinstance(step, int) and registry is not None:
            owner, of_owner, registry = registry.class_of(values, folders) or owner, registry, None
        if not isinstance(step, int) and step not in owner.model_fields and not isinstance(values, Mapping):
            continue  # pydantic's name for an alternative of a union
        path.append(str(step))
        values = inside(values, step)
        if str(step) not in owner.model_fields:
            continue
        field = owner.model_fields[str(step)]
        registry = next(registries_in(field.annotation, field.metadata), None)
        models = list(models_in(field.annotation))
        members = {
            str(candidate.model_fields["kind"].default): candidate
            for candidate in models
            if "kind" in candidate.model_fields
        }
        if len(models) == 1:
            owner, of_owner = models[0], None
    return ".".join(path), owner, of_owner


def inside(values: Any, step: int | str) -> Any:
    """Return the value at one step of a path; a section that stands for a list of it alone is its only element."""
    if isinstance(values, Mapping):
        return values if isinstance(step, int) else values.get(step)
    return values[step] if isinstance(values, list | tuple) and isinstance(step, int) else values


def registries_in(annotation: Any, metadata: Iterable[Any] = ()) -> Iterator[Registry]:
    """Yield the registries that a field's type and metadata name."""
    yield from (candidate for candidate in (annotation, *metadata) if isinstance(candidate, Registry))
    for part in get_args(annotation):
        yield from registries_in(part)


def models_in(annotation: Any) -> Iterable[type[BaseModel]]:
    """Yield the models that a field's type names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values as dotted keys; lists of plain values stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple) and any(isinstance(entry, Mapping) for entry in value):
            flat |= flatten({str(index): entry for index, entry in enumerate(value)}, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


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
        return registry.default if registry is not None and registry.default else kind_in(default)

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
            part == dict[str, Any] or (isinstance(part, type) and issubclass(part, BaseModel))
            for part in _members(field.annotation)
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
        for part in get_args(annotation):
            yield from _members(part)
    else:
        yield annotation


def _plain(default: Any, registry: Registry | None) -> Any:
    if isinstance(default, tuple | list):
        return [_plain(entry, registry) if isinstance(entry, BaseModel) else deepcopy(entry) for entry in default]
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
        at = _place(values, key, path)
        present = inside(values, at) if isinstance(values, dict) or at < len(values) else None
        following = keys[depth + 1]
        if isinstance(present, str):
            present = {"kind": present}
        if not isinstance(present, dict | list):
            default = None if defaults is None else defaults.at(root, keys[: depth + 1])
            present = default if isinstance(default, dict | list) else {}
        if isinstance(present, dict) and following.isdecimal() and "kind" in present:
            present = [present]
        _set(values, at, present)
        values = present
    at = _place(values, keys[-1], path)
    if at == "kind" and values.get("kind", value) != value:
        values.clear()  # the fields of one kind mean nothing to another
    _set(values, at, value)


def _set(values: Any, at: Any, value: Any) -> None:
    if isinstance(values, list) and at == len(values):
        values.append(value)
    else:
        values[at] = value


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


def plain_values(model: BaseModel) -> dict[str, Any]:
    """Return the values of a model as JSON has them; raise `KeyboardInterrupt` if one comes while a field is written.

    pydantic makes an error of it, by a text alone, where it calls a function of Python.
    """
    try:
        values: dict[str, Any] = json.loads(model.model_dump_json())
    except PydanticSerializationError as error:
        if KeyboardInterrupt.__name__ in str(error):
            raise KeyboardInterrupt from error
        raise
    return values


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
