"""Experiment files: YAML 1.2 and dotted overrides, read into frozen models, with errors that name the dotted path."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from narrowcast.platform.errors import UserError
from narrowcast.platform.kinds import FOLDERS, Registry
from narrowcast.platform.redaction import check_address, redact, redact_values
from narrowcast.platform.yaml_limits import check_limits

ModelT = TypeVar("ModelT", bound=BaseModel)
PLUGINS = "plugins"
"""The folder, beside a run's config.yaml, of the modules that its own classes come from."""
_ERRORS_SHOWN = 4
_MAY_HOLD_A_PASSWORD = ("tracking.uri", "study.storage")


def read_yaml(text: str, origin: str) -> Any:
    """Parse YAML 1.2, in which 1e-3 is a number; raise a `UserError` with line and column, also above `yaml_limits`."""
    try:
        check_limits(text, origin)
        return YAML(typ="safe", pure=True).load(text)
    except UserError:
        raise
    except (YAMLError, ValueError) as error:  # ValueError: a tagged number or date that is none
        mark = getattr(error, "problem_mark", None)
        place = f"{origin}, line {mark.line + 1}, column {mark.column + 1}" if mark else origin
        problem = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise UserError(f"{place}: not valid YAML: {problem}; correct the file") from error


def write_yaml(values: Mapping[str, Any], target: Path | TextIO) -> None:
    """Write nested plain values as block-style YAML, in their order."""
    yaml = YAML(pure=True)
    yaml.dump(dict(values), target)


def apply_overrides(values: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Set `a.b=value` items in nested values; the value is read as YAML. Another `kind` starts its section over."""
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.split(".")
        if not equals or not all(keys):
            raise UserError(f'"{override}" is no override; write a.b=value, such as algorithm.rank=8')
        set_value(values, path, read_yaml(text, f"override {path}"))
    return values


def set_value(values: Any, path: str, value: Any) -> None:
    """Set the value at a dotted path in nested values, in place."""
    *parents, last = path.split(".")
    for key in parents:
        if isinstance(values, list):
            values = values[_place(values, key, path)]
            continue
        if isinstance(values.get(key), str):
            values[key] = {"kind": values[key]}
        if not isinstance(values.get(key), dict | list):
            values[key] = {}
        values = values[key]
    if isinstance(values, list):
        values[_place(values, last, path)] = value
        return
    if last == "kind" and values.get("kind", value) != value:
        values.clear()  # the fields of one kind mean nothing to another
    values[last] = value


def _place(values: list[Any], key: str, path: str) -> int:
    if not key.isdigit() or int(key) >= len(values):
        raise UserError(f'override {path}: "{key}" is no place in a list of {len(values)}; use 0 to {len(values) - 1}')
    return int(key)


def validate(model: type[ModelT], values: Any, origin: str) -> ModelT:
    """Build the model, or raise one `UserError` that says for each bad value what was got and what is allowed.

    Kinds such as `package.module:Class` are imported from the folder of the file that `origin` names, from `plugins` in
    it, and from the current directory.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{origin}: expected keys and values at the top, got {type(values).__name__}")
    _refuse_secrets(values, origin)
    try:
        valid = model.model_validate(values, context={FOLDERS: plugin_folders(origin)})
    except ValidationError as error:
        # A misspelt key first: it is why another is missing.
        found = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        problems = [_explain(model, dict(problem), values, plugin_folders(origin)) for problem in found]
        more = f" (and {len(problems) - _ERRORS_SHOWN} more)" if len(problems) > _ERRORS_SHOWN else ""
        raise UserError(f"{origin}: " + "; ".join(problems[:_ERRORS_SHOWN]) + more) from error
    dumped = valid.model_dump()
    _refuse_secrets(dumped, origin)
    for path, value in flatten(dumped).items():
        if isinstance(value, float) and not math.isfinite(value):  # JSON has no such numbers
            raise UserError(f"{origin}: {path} = {value}: should be a finite number")
    return valid


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


def plugin_folders(origin: str) -> list[Path]:
    """Return the folders in which the modules of an experiment file's own classes are looked for."""
    folder = Path(origin).parent
    return [folder / PLUGINS, folder, Path.cwd()]


def _explain(model: type[BaseModel], problem: dict[str, Any], values: Any, folders: list[Path]) -> str:
    path, owner = _locate(model, problem["loc"], values, folders)
    context = problem.get("ctx", {})
    got = problem["input"]
    match problem["type"]:
        case "extra_forbidden":
            known = sorted(owner.model_fields)
            return f"{path} is unknown; known here: {', '.join(known)}{suggest(path.split('.')[-1], known)}"
        case "union_tag_invalid":
            known = [tag.strip().strip("'") for tag in context["expected_tags"].split(",")]
            tag = context["tag"]
            return f'{path}.kind = "{tag}" is unknown; known: {", ".join(known)}{suggest(tag, known)}'
        case "kind_unknown":
            known, kind = context["known"].split(","), context["kind"]
            return f'{path}.kind = "{kind}" is unknown; known: {", ".join(known)}{suggest(kind, known)}'
        case "kind_refused":
            said = context["problem"].removeprefix(context["kind"]).removeprefix(" ")
            message = f"{path}.kind = {context['kind']}: {said}"
        case "union_tag_not_found" | "kind_missing":
            message = f"{path}.kind is missing; say which kind it is"
        case "missing":
            message = f"{path} is missing"
        case _:
            said = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
            message = f"{path} = {redact(repr(got))}: {said}"
    return message


def suggest(word: str, known: Iterable[str]) -> str:
    """The closest known word as a question, or nothing."""
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f'. Did you mean "{close[0]}"?' if close else ""


def _locate(
    model: type[BaseModel], location: tuple[int | str, ...], values: Any, folders: list[Path]
) -> tuple[str, type[BaseModel]]:
    """Return the dotted path of an error, without the union tags that pydantic adds, and the model that it is in."""
    path: list[str] = []
    owner = model
    registry: Registry | None = None
    members: dict[str, type[BaseModel]] = {}
    for step in location:
        if str(step) in members and (not path or str(step) not in owner.model_fields):
            owner, members = members[str(step)], {}
            continue
        if not isinstance(step, int) and registry is not None:
            owner, registry = registry.class_of(values, folders) or owner, None
        path.append(str(step))
        values = _inside(values, step)
        if str(step) not in owner.model_fields:
            continue
        field = owner.model_fields[str(step)]
        registry = next(_registries_in(field.annotation, field.metadata), None)
        models = list(_models_in(field.annotation))
        members = {str(each.model_fields["kind"].default): each for each in models if "kind" in each.model_fields}
        if len(models) == 1:
            owner = models[0]
    return ".".join(path), owner


def _inside(values: Any, step: int | str) -> Any:
    """Return the value at one step of a path; a section that stands for a list of it alone is its only element."""
    if isinstance(values, Mapping):
        return values if isinstance(step, int) else values.get(step)
    return values[step] if isinstance(values, list | tuple) and isinstance(step, int) else values


def _registries_in(annotation: Any, metadata: Iterable[Any] = ()) -> Iterator[Registry]:
    yield from (each for each in (*metadata, *getattr(annotation, "__metadata__", ())) if isinstance(each, Registry))
    for part in get_args(annotation):
        yield from _registries_in(part)


def _models_in(annotation: Any) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values as dotted keys; lists of plain values stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
            flat |= flatten({str(place): each for place, each in enumerate(value)}, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
