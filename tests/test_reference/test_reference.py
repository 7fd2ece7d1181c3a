"""The reference: every field of every kind is described and on its page, and the schemas take what narrowcast takes."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
from click.testing import CliRunner
from pydantic import BaseModel

import narrowcast
from narrowcast.cli.main import cli
from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.config.catalog import REGISTRIES
from narrowcast.platform.config.yaml import read_yaml
from narrowcast.platform.errors import UserError
from narrowcast.reference.file_schemas import benchmark_schema, experiment_schema, solve_schema, study_schema
from narrowcast.reference.reference_pages import in_yaml, prose, reference_pages
from narrowcast.tuning.study_file import StudySections

PACKAGED = files("narrowcast") / "experiments"
GOOD = {"data": "digits", "model": "mlp", "algorithm": "fedavg"}
pages = cache(reference_pages)


@cache
def schema_of(name: str) -> dict[str, Any]:
    schemas = {"experiment": experiment_schema, "solve": solve_schema, "benchmark": benchmark_schema}
    return {**schemas, "study": study_schema}[name]()


@cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    """Return a validator of a schema that is a schema, which `jsonschema.validate` would check each time."""
    return jsonschema.Draft202012Validator(schema_of(name))


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from models_in(field.annotation)
    for part in get_args(annotation):
        yield from models_in(part)


def page_of() -> Iterator[tuple[str, type[BaseModel]]]:
    """Every page with the models whose fields it must have, found without the schemas."""
    elsewhere = {each for registry in REGISTRIES.values() for each in (registry.contract, *registry.values())}
    for path, top in (("experiment.md", Experiment), ("study.md", StudySections)):
        yield from ((path, each) for each in {*models_in(top)} - elsewhere)
    for registry in REGISTRIES.values():
        for kind, found in registry.items():
            yield from ((f"{registry.name}/{kind}.md", each) for each in {*models_in(found)} - elsewhere | {found})


@pytest.mark.parametrize(
    ("page", "model"), sorted(page_of(), key=str), ids=lambda each: getattr(each, "__name__", each)
)
def test_every_field_is_described_and_on_its_page(page: str, model: type[BaseModel]) -> None:
    first, *others = pages()[page].split("\n## ")
    text = next((part for part in others if part.startswith(f"{model.__name__}\n")), first)
    for name, field in model.model_fields.items():
        if name == "kind":
            continue
        assert field.description, f"{model.__name__}.{name} has no description"
        row = next((line for line in text.splitlines() if line.startswith(f"| `{name}` |")), None)
        assert row is not None, f"{page} lacks {model.__name__}.{name}"
    if model not in (Experiment, StudySections):
        assert prose((inspect.getdoc(model) or "").splitlines()[0]) in text


def test_the_reference_has_all_registries() -> None:
    assert {path.split("/")[0] for path in pages() if "/" in path} == set(REGISTRIES)


@pytest.mark.parametrize("name", ["experiment", "solve", "benchmark", "study"])
def test_schemas_are_schemas_and_describe_every_property(name: str) -> None:
    schema = schema_of(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    sections = {name: schema, **schema["$defs"]}
    lacking = [
        f"{place}.{field}"
        for place, section in sections.items()
        for field, each in section.get("properties", {}).items()
        if not each.get("description")
    ]
    assert lacking == []
    assert "x-registry" not in json.dumps(schema)


@pytest.mark.parametrize("path", sorted(PACKAGED.rglob("*.yaml")), ids=lambda path: path.stem)  # type: ignore[attr-defined]
def test_schemas_take_the_packaged_files(path: Any) -> None:
    name = {"studies": "study", "solves": "solve", "benchmarks": "benchmark"}.get(path.parent.name, "experiment")
    validator(name).validate(read_yaml(path.read_text(), path.name))


def test_the_schema_takes_what_is_written_down() -> None:
    for name in ("scolr-channel-ml1m", "fedavg-digits"):
        validator("experiment").validate(load_experiment(name).plain())


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": "fedavgg"},
        {"algorithm": {"kind": "fedavg", "server_learnig_rate": 1}},
        {"algorithm": {"kind": "fedavg", "codec": [{"kind": "quantise", "levels": 0}]}},
        {"algorithm": {"kind": "fedavg", "codec": ["quantize"]}},
        {"rounds": 0},
        {"rounds": "ten"},
        {"seeds": 1},
        {"fleet": {"kind": "tiers", "tiers": [{"name": "a", "share": 1}]}},
        {"radio": {"channel": {"kind": "rayleigh", "access": "none"}}},
        {"model": {"hidden": [0]}},
        {"data": {"path": "x"}},
    ],
    ids=str,
)
def test_the_schema_refuses_what_narrowcast_refuses(change: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validator("experiment").validate({**GOOD, **change})
    overrides = [f"{key}={json.dumps(value)}" for key, value in {**GOOD, **change}.items()]
    with pytest.raises(UserError):
        load_experiment("fedavg-digits", overrides)


def test_the_schema_takes_sections_whose_kind_follows_from_the_data() -> None:
    change = {"model": {"hidden": [3]}, "training": {"momentum": 0.5}}
    validator("experiment").validate({**GOOD, **change})
    load_experiment("fedavg-digits", [f"{key}={json.dumps(value)}" for key, value in change.items()])


def test_the_schema_takes_classes_of_ones_own() -> None:
    for algorithm in ("my_methods:FedAvgM", {"kind": "my_methods:FedAvgM", "momentum": 0.5}):
        validator("experiment").validate({**GOOD, "algorithm": algorithm})


@pytest.mark.parametrize("name", ["experiment", "solve", "benchmark", "study"])
def test_the_command_prints_a_schema(name: str) -> None:
    printed = CliRunner().invoke(cli, ["schema", name])
    assert printed.exit_code == 0
    assert json.loads(printed.stdout) == schema_of(name)


def test_the_api_reference_has_every_public_name() -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    missing = [
        name
        for name in narrowcast.__all__
        if not re.search(rf"autofunction:: {name}$|narrowcast\.{name}\b|`nc\.{name}`", text, re.MULTILINE)
    ]
    assert missing == []


def test_units_are_on_the_pages() -> None:
    rows = {line.split(" | ")[0]: line.split(" | ") for line in pages()["channel/rayleigh.md"].splitlines()}
    assert rows["| `bandwidth_hertz`"][2] == "Hz"
    assert rows["| `nearest`"][2] == "m"
    assert rows["| `coherence`"][2] == "rounds"
    assert rows["| `exponent`"][2] == ""


def test_values_are_yaml_on_one_line() -> None:
    assert in_yaml({"kind": "iid", "b": [1, None]}) == "`{kind: iid, b: [1, null]}`"
    assert in_yaml(1e-3) == "`0.001`"
    assert in_yaml("yes: no") == "`'yes: no'`"
