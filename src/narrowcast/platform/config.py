"""Experiment files: YAML 1.2, read into frozen models, with errors that name the dotted path."""

from __future__ import annotations

import difflib
import json
import math
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from narrowcast.platform.errors import UserError
from narrowcast.platform.kinds import FOLDERS, Registry, optional
from narrowcast.platform.redaction import check_address, redact, redact_values
from narrowcast.platform.yaml_limits import load_limited

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


def read_yaml(text: str, origin: str) -> Any:
    """Parse YAML 1.2, in which 1e-3 is a number; raise a `UserError` with line and column, also above `yaml_limits`."""
    try:
        return load_limited(text, origin)
    except UserError:
        raise
    except LookupError as error:  # of ruamel.yaml, for a tagged number without digits or truth value that is none
        raise UserError(f"{origin}: not valid YAML: a value is not of its tag; correct the file") from error
    except (YAMLError, ValueError, TypeError) as error:  # a tagged number or date that is none; a mapping as a key
        marked = error if isinstance(error, MarkedYAMLError) else None
        mark = marked.problem_mark if marked else None
        place = f"{origin}, line {mark.line + 1}, column {mark.column + 1}" if mark else origin
        problem = str((marked.problem if marked else None) or error).splitlines()[0]
        raise UserError(f"{place}: not valid YAML: {problem}; correct the file") from error


def write_yaml(values: Mapping[str, Any], target: Path | TextIO) -> None:
    """Write nested plain values as block-style YAML, in their order."""
    yaml = YAML(pure=True)
    yaml.dump(dict(values), target)


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
    """Return what is wrong with the top of a file that is no mapping."""
    if values is None:
        return "the file is empty; give a mapping, with a line KEY: VALUE for each setting"
    return f"should be a mapping at the top, with a line KEY: VALUE for each setting; got {type(values).__name__}"


def explained(model: type[BaseModel], error: ValidationError, values: Any, folders: list[Path]) -> str:
    """Return in one line what is wrong with the values of a model; kinds are imported from the folders."""
    # A misspelt key first: it is why another is missing.
    found = sorted(_causes(error.errors()), key=lambda problem: problem["type"] != "extra_forbidden")
    problems = _joined([_explain(model, dict(problem), values, folders) for problem in found])
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


def _refuse_truth_values(given: Any, read: Any, path: str) -> None:
    """Raise `UserError` for a true or false that was read as the number 1 or 0."""
    if isinstance(given, bool) and isinstance(read, int | float) and not isinstance(read, bool):
        raise UserError(f"{path} = {str(given).lower()}: should be a number")
    pairs: Iterable[tuple[Any, Any, Any]] = ()
    if isinstance(given, Mapping) and isinstance(read, Mapping):
        pairs = ((key, value, read[key]) for key, value in given.items() if key in read)
    elif isinstance(given, list | tuple) and isinstance(read, list | tuple):
        pairs = zip(range(len(given)), given, read, strict=False)
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
            others = [kind for kind, each in (registry or {}).items() if word in each.model_fields]
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
            said = context["problem"].removeprefix(context["kind"]).removeprefix(" ")
            message = f"{path}.kind = {context['kind']}: {said}"
        case "union_tag_not_found" | "kind_missing":
            kinds = ", ".join(context.get("known", "").split(",")[:3])
            message = f"{path}.kind is missing; add kind: ..." + (f", such as {kinds}" if kinds else "")
        case "missing":
            message = f"{path} is missing"
        case _:
            said = _FIRST_WORDS.sub("", _SHOULD.get(problem["type"]) or problem["msg"])
            names_its_field = bool(path) and said.startswith(f"{path}.")
            message = said if names_its_field or not path else f"{_with_value(path, got)}: {said}"
    return message


def _causes(found: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Return the errors without those of lists that are too short because an element is wrong."""
    places = [each["loc"] for each in found]
    return [
        each
        for each in found
        if each["type"] != "too_short" or not any(place[: len(each["loc"])] == each["loc"] != place for place in places)
    ]


def _with_value(path: str, got: Any) -> str:
    """Return a path with its wrong value; of a section its kind, since what is wrong is between its fields."""
    kind = got.get("kind") if isinstance(got, Mapping) else optional(got, "kind")
    if isinstance(kind, str):
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
        subject, separator, said = problem.partition(": should be ")
        merged[subject] = f"{merged[subject]}, or {said}" if separator and subject in merged else problem
    return list(merged.values())


def command(*words: object) -> str:
    """Return a command of narrowcast as a shell takes it, paths quoted."""
    return shlex.join(["narrowcast", *map(str, words)])


def suggest(word: str, known: Collection[str]) -> str:
    """The closest known word as a question, or nothing."""
    section, _, last = str(word).rpartition(".")
    # Names of one section are compared without it: test.loss is not like test.f1.
    beside = {each.rpartition(".")[2]: each for each in known if section and each.rpartition(".")[0] == section}
    others = [each for each in known if each not in beside.values()]
    close = difflib.get_close_matches(last, beside, n=1) or difflib.get_close_matches(str(word), others, n=1)
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
        members = {str(each.model_fields["kind"].default): each for each in models if "kind" in each.model_fields}
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
    yield from (each for each in (annotation, *metadata) if isinstance(each, Registry))
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
        elif isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
            flat |= flatten({str(place): each for place, each in enumerate(value)}, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
