"""JSON Schemas of experiment, solve, benchmark and study files, for editors and for the reference pages."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from pydantic import BaseModel

from narrowcast._version import __version__
from narrowcast.benchmarking.file import BenchmarkFile
from narrowcast.experiment import Experiment
from narrowcast.platform.config.catalog import OF_EXPERIMENTS, REGISTRIES
from narrowcast.platform.config.fields import unit_of
from narrowcast.platform.config.kinds import MARK, Registry
from narrowcast.solve_run import Solve
from narrowcast.tuning.study_file import StudySections

Schema = dict[str, Any]
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_BY_DATA = ("model", "training")
"""Sections whose default kind depends on the data set, so that any of their kinds may be written without one."""
_OWN_CLASS = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
_REPLICAS = {
    "type": "object",
    "description": "lists of values by dotted path; the run is repeated for every combination of them",
    "default": {},
}


def experiment_schema() -> Schema:
    """Return the JSON Schema (draft 2020-12) of an experiment file."""
    schema = _experiment()
    schema["properties"]["replicas"] = _REPLICAS
    return _document(schema, "narrowcast experiment")


def solve_schema() -> Schema:
    """Return the JSON Schema (draft 2020-12) of a solve file."""
    schema = _schema_of(Solve)
    schema["properties"]["replicas"] = _REPLICAS
    return _document(schema, "narrowcast solve")


def benchmark_schema() -> Schema:
    """Return the JSON Schema (draft 2020-12) of a benchmark file."""
    schema = _schema_of(BenchmarkFile)
    for section, registry in (("problems", "problem"), ("solvers", "solver")):
        patterns = schema["properties"][section]["patternProperties"]
        patterns |= {pattern: {MARK: registry} for pattern in patterns}
        schema["properties"][section]["additionalProperties"] = False
    schema["required"].remove("name")
    return _document(schema, "narrowcast benchmark")


def study_schema() -> Schema:
    """Return the JSON Schema (draft 2020-12) of a study file."""
    schema, experiment = _schema_of(StudySections), _experiment()
    base = {"type": "string", "description": "name or file of the experiment whose values the others replace"}
    section = {
        "type": "object",
        "additionalProperties": False,
        "properties": {"base": base, **experiment["properties"]},
    }
    solve = _schema_of(Solve)
    of_solve = {**section, "properties": {"base": base, **solve["properties"]}}
    for name, values in (("experiment", section), ("solve", of_solve)):
        described = {key: schema["properties"][name][key] for key in ("description", "default")}
        schema["properties"][name] = {**described, "anyOf": [{"type": "string"}, values]}
    schema["required"].remove("name")
    schema["$defs"] |= solve.get("$defs", {}) | experiment.get("$defs", {})
    document = _document(schema, "narrowcast study")
    for name in OF_EXPERIMENTS.keys() & document["$defs"].keys():  # a section without a kind has that of the base
        document["$defs"][name]["anyOf"].append({"type": "object", "not": {"required": ["kind"]}})
    return document


def _experiment() -> Schema:
    schema = _schema_of(Experiment)
    for name in _BY_DATA:
        del schema["properties"][name]["default"]
    return schema


def _document(schema: Schema, title: str) -> Schema:
    """Return the schema with the definitions of every registry that it refers to, at whatever depth."""
    definitions = schema.pop("$defs", {})
    waiting = [schema, *definitions.values()]
    while waiting:
        for name in sorted(set(_registries_in(waiting.pop())) - definitions.keys()):
            kinds = _definitions_of(REGISTRIES[name])
            waiting.extend(definition for key, definition in kinds.items() if key not in definitions)
            definitions |= kinds
    document = {**schema, "$defs": dict(sorted(definitions.items()))}
    _refer(document)
    return {"$schema": _DRAFT, **document, "title": title, "$comment": f"narrowcast schema, version {__version__}"}


def _definitions_of(registry: Registry) -> dict[str, Schema]:
    """Return the definitions NAME, any of the kinds, and NAME.KIND, each of them."""
    definitions: dict[str, Schema] = {}
    for kind in registry.known():
        schema = _schema_of(registry.resolve(kind))
        definitions |= schema.pop("$defs", {})
        schema["properties"]["kind"] |= {"const": kind}
        required = [name for name in schema.get("required", ()) if name != "kind"]
        optional = kind == registry.default or registry.name in _BY_DATA
        schema["required"] = required if optional else ["kind", *required]
        definitions[f"{registry.name}.{kind}"] = schema
    own_class = {"type": "string", "pattern": _OWN_CLASS, "description": "a class of your own, package.module:Class"}
    definitions[registry.name] = {
        "anyOf": [
            {"enum": registry.known()},
            own_class,
            *({"$ref": f"#/$defs/{registry.name}.{kind}"} for kind in registry.known()),
            {"type": "object", "required": ["kind"], "properties": {"kind": own_class}},
        ]
    }
    return definitions


def _schema_of(model: type[BaseModel]) -> Schema:
    """Return pydantic's schema with units, and without the titles that it makes from the names."""
    schema = model.model_json_schema()
    for part in (schema, *schema.get("$defs", {}).values()):
        part.pop("title", None)
        for name, field in part.get("properties", {}).items():
            _without_titles(field)
            if unit := unit_of(name, field):
                field["unit"] = unit
            if name == "kind":
                field["description"] = "picks the class of this section"
    return deepcopy(schema)


def _without_titles(schema: Any) -> None:
    for section in _sections_in(schema):
        section.pop("title", None)


def _registries_in(schema: Any) -> Iterator[str]:
    return (section[MARK] for section in _sections_in(schema) if MARK in section)


def _refer(schema: Any) -> None:
    """Replace the mark of each field of a registry by a reference to its definition, in place."""
    for section in _sections_in(schema):
        if MARK in section:
            section["$ref"] = f"#/$defs/{section.pop(MARK)}"


def _sections_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every section of a schema that is not a value of an experiment."""
    if isinstance(schema, list):
        for entry in schema:
            yield from _sections_in(entry)
    if not isinstance(schema, dict):
        return
    yield schema
    for key, entry in schema.items():
        if key not in ("default", "const", "enum", "examples"):
            yield from _sections_in(entry)
