"""The pages of the reference, in Markdown: files, registries and kinds, from the models' fields and docstrings.

A table of fields, with type and range, unit, default and description, is made from their JSON Schema.
"""

from __future__ import annotations

import inspect
import io
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from ruamel.yaml import YAML

from narrowcast.api import REGISTRY_NAMES
from narrowcast.platform.config.catalog import MODEL_DEFAULTS, REGISTRIES, TRAINING_DEFAULTS
from narrowcast.platform.config.kinds import Registry
from narrowcast.reference.file_schemas import benchmark_schema, experiment_schema, solve_schema, study_schema

Schema = Mapping[str, Any]
_DEFS = "#/$defs/"
_WORDS = {None: "any value", "null": "`null`", "boolean": "`true`, `false`"}


def table(schema: Schema, root: str) -> str:
    """Return the table of a section's fields; `root` is the path from its page to the reference's folder."""
    rows = ["| field | type | unit | default | description |", "|---|---|---|---|---|"]
    required = schema.get("required", ())
    fields = schema.get("properties", {})
    for name in sorted(fields, key=lambda name: name not in required):
        field = fields[name]
        if "const" in field:
            continue
        default = "required" if name in required else _default(field)
        cells = (f"`{name}`", type_of(field, root), field.get("unit", ""), default, prose(field["description"]))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) if len(rows) > 2 else "No fields."


def _default(field: Schema) -> str:
    """Return the default on one line; of a section its kind, or that it has its own defaults."""
    if "default" not in field:
        return "computed"
    default = field["default"]
    if "$ref" in field and isinstance(default, Mapping):
        return in_yaml(default["kind"]) if "kind" in default else "as below"
    return in_yaml(default)


def type_of(field: Schema, root: str) -> str:
    """Return the type of a field and the range of its values, in words."""
    if "$ref" in field:
        name = str(field["$ref"]).removeprefix(_DEFS)
        return f"[{name}](#{name.lower()})" if name[0].isupper() else f"[{name}]({root}{name}/index.md)"
    if choices := field.get("anyOf", field.get("oneOf")):
        return " or ".join(dict.fromkeys(type_of(choice, root) for choice in choices))
    if "enum" in field:
        return ", ".join(in_yaml(value) for value in field["enum"])
    match field.get("type"):
        case "array":
            items = field.get("prefixItems", [field.get("items", {})])
            text = "list of " + " and ".join(dict.fromkeys(type_of(item, root) for item in items))
        case "object":
            values = field.get("additionalProperties")
            text = f"section of {type_of(values, root)}" if isinstance(values, Mapping) else "section"
        case kind:
            text = _WORDS.get(kind, str(kind)) + _range(field)
    return text


def _range(field: Schema) -> str:
    if {"minimum", "maximum"} <= field.keys():
        return f" from {_power(field['minimum'])} to {_power(field['maximum'])}"
    bounds = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
    limits = [f"{sign} {_power(field[key])}" for key, sign in bounds if key in field]
    return " " + " and ".join(limits) if limits else ""


def _power(bound: float) -> str:
    exponent = int(bound).bit_length() - 1
    if bound == 2**exponent and exponent > 10:
        return f"2^{exponent}"
    return f"{int(bound):,}" if bound == int(bound) and abs(bound) < 1e10 else f"{bound:g}"


def in_yaml(value: Any) -> str:
    """Return a value as a YAML file has it, on one line and as code."""
    yaml, text = YAML(typ="safe", pure=True), io.StringIO()
    yaml.default_flow_style = True
    yaml.width = 10_000
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.dump(value, text)
    line = text.getvalue().removesuffix("...\n").strip()
    return f"`{line}`"


def references(schema: Any) -> Iterator[str]:
    """Yield the names of the definitions that a schema refers to."""
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            yield str(schema["$ref"]).removeprefix(_DEFS)
        for value in schema.values():
            yield from references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from references(value)


def prose(text: str) -> str:
    """Return plain text with `code` as Markdown: all other marks stand for themselves."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*<\[\]$#])", r"\\\1", part) for part in parts)


_TITLES = {
    "algorithm": ("Algorithms", "federated algorithm", "algorithm"),
    "codec": ("Codec stages", "codec stage", "algorithm.codec"),
    "data": ("Data sets", "data set", "data"),
    "partition": ("Partitions of data across clients", "partition of data across clients", "data.partition"),
    "model": ("Models", "model", "model"),
    "loss": ("Losses of networks", "loss of a network", "model.loss"),
    "metric": ("Metrics of networks", "metric of a network", "model.metrics"),
    "training": ("Local training", "local training", "training"),
    "learning_rate_schedule": (
        "Learning-rate schedules of local training",
        "learning-rate schedule",
        "training.learning_rate_schedule",
    ),
    "fleet": ("Fleets: links and compute speed of clients", "fleet of clients", "fleet"),
    "channel": ("Channels", "channel", "radio.channel"),
    "allocation": ("Allocation of uplink bits", "allocation of uplink bits", "radio.allocation"),
    "downlink": ("Downlink transmission", "downlink transmission", "radio.downlink"),
    "sampling": ("Client sampling", "client sampling", "sampling"),
    "availability": ("Availability of clients", "availability of clients", "availability"),
    "schedule": ("Schedules: synchronous and buffered asynchronous", "schedule of the server's steps", "schedule"),
    "secure": ("Secure aggregation", "secure aggregation", "secure"),
    "rank_policy": ("Rank policies of SCoLR and LoRA", "rank policy", "algorithm.rank_policy"),
    "server_optimizer": ("Server optimizers", "server optimizer", "algorithm.server_optimizer"),
    "aggregator": ("Aggregators", "aggregator", "algorithm.aggregator"),
    "attack": ("Attacks", "attack", "attack"),
    "topology": ("Topologies: links between clients", "topology", "algorithm.topology"),
    "problem": ("Problems without clients", "problem", "problem"),
    "solver": ("Solvers", "solver", "solver"),
    "backend": ("Backends", "backend", "backend"),
    "sampler": ("Samplers of studies", "sampler of a study", "study.sampler"),
    "pruner": ("Pruners of studies", "pruner of a study", "study.pruner"),
}
"""By registry, in the reference's order: its page's title, the words for one of its kinds, the section of a file."""

_EXPERIMENT = """# Experiment files

An experiment is a YAML file with these sections. Fields left out have their defaults; `data` and `algorithm` are
required. A section whose type is a kind may be written as the kind alone: `data: digits`. On the command line any field
is set by its dotted path: `narrowcast run fedavg-digits algorithm.codec.0.levels=3`.

Editors that support the YAML language server complete and check a file with this first line, after
`narrowcast schema experiment > experiment.schema.json`:

```yaml
# yaml-language-server: $schema=experiment.schema.json
```

"""
_SOLVE = """# Solve files

A solve is a YAML file with these sections; `problem` and `solver` are required. `narrowcast schema solve` prints its
JSON Schema. See [problems and solvers](../solve.md).

"""
_BENCHMARK = """# Benchmark files

A benchmark is a YAML file with these sections; `problems` and `solvers` are required. `narrowcast schema benchmark`
prints its JSON Schema. See [benchmarks of solvers](../solve.md).

"""
_STUDY = """# Study files

A study is a YAML file with these sections. `narrowcast schema study` prints its JSON Schema.

"""
_INDEX = """# Reference of experiment and study files

The pages of this chapter are generated from the fields of the classes: every field with its type and range, its unit,
its default and a description. A unit is empty for counts, ratios and names. See [experiment files](experiment.md) for
all sections of a run, and the pages of [solve](solve.md), [benchmark](benchmark.md) and [study](study.md) files.

| section | kinds |
|---|---|
"""
_TREE = "\n\n```{toctree}\n:hidden:\n"


def write_pages(folder: Path) -> None:
    """Write the reference's pages into a folder, over what is there."""
    for name, text in reference_pages().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def reference_pages() -> dict[str, str]:
    """Return the text of every page by its path in the reference's folder."""
    experiment, solve, study = experiment_schema(), solve_schema(), study_schema()
    definitions: dict[str, Schema] = {**study["$defs"], **solve["$defs"], **experiment["$defs"]}
    searched = {**study, "properties": {**study["properties"], **_RUN_OF_A_STUDY}}
    pages = {
        "experiment.md": _EXPERIMENT + _fields(experiment, definitions, ""),
        "solve.md": _SOLVE + _fields(solve, definitions, ""),
        "benchmark.md": _BENCHMARK + _fields(benchmark_schema(), definitions, ""),
        "study.md": _STUDY + _fields(searched, definitions, ""),
    }
    index = _INDEX
    for name, (title, _, section) in _TITLES.items():
        registry = REGISTRIES[name]
        kinds = {kind: registry.resolve(kind) for kind in registry.known()}
        pages[f"{name}/index.md"] = _registry_page(registry, title, section, kinds)
        index += f"| [`{section}`]({name}/index.md) | {', '.join(f'[{k}]({name}/{k}.md)' for k in kinds)} |\n"
        for kind, cls in kinds.items():
            pages[f"{name}/{kind}.md"] = _kind_page(registry, kind, cls, definitions)
    files = "".join(f"{name.capitalize()} files <{name}>\n" for name in ("experiment", "solve", "benchmark", "study"))
    kinds_by_section = "".join(f"{section} <{name}/index>\n" for name, (_, _, section) in _TITLES.items())
    pages["index.md"] = f"{index}{_TREE}{files}{kinds_by_section}```\n"
    return pages


_RUN_OF_A_STUDY = {
    name: {
        "anyOf": [{"type": "string"}, {"type": "object"}],
        "description": f"{text}: its name, or `base` with values on top, or all of its sections",
    }
    for name, text in (
        ("experiment", "experiment of every trial"),
        ("solve", "solve of every trial, in place of an experiment"),
    )
}


def _registry_page(registry: Registry, title: str, section: str, kinds: dict[str, type[BaseModel]]) -> str:
    default = f" The kind may be left out: `{registry.default}` is the default." if registry.default else ""
    rows = "\n".join(f"| [`{kind}`]({kind}.md) | {_cell(_summary(cls))} |" for kind, cls in kinds.items())
    text = (
        f"# {title}\n\n`{section}` in a file takes one of the kinds below, an entry point of the group `narrowcast`, "
        f"or a class of your own as `package.module:Class` (see [plugins](../../plugins.md)).{default}\n\n"
        f"| kind | description |\n|---|---|\n{rows}\n"
    )
    return text + _TREE + "".join(f"{kind} <{kind}>\n" for kind in kinds) + "```\n"


def _kind_page(registry: Registry, kind: str, cls: type[BaseModel], definitions: dict[str, Schema]) -> str:
    namespace = next((name for name, of in REGISTRY_NAMES.items() if of == registry.name), None)
    python = f" In Python: `nc.{namespace}.{cls.__name__}`." if namespace else ""
    title, phrase, section = _TITLES[registry.name]
    text = f"# {kind}: {phrase}\n\nA kind of `{section}` in a file ([{title.lower()}](index.md)).{python}\n\n"
    text += (
        f"{_doc(cls)}\n\n"
        + _by_data(registry, kind)
        + _fields(definitions[f"{registry.name}.{kind}"], definitions, "../")
    )
    module = inspect.getdoc(sys.modules[cls.__module__]) or ""
    sources = [paragraph for paragraph in module.split("\n\n") if paragraph.startswith("Reference")]
    return text + "".join(f"\n\n{prose(source)}\n" for source in sources)


def _by_data(registry: Registry, kind: str) -> str:
    """Return the default model and training of a data set, nothing for other kinds."""
    if registry.name != "data":
        return ""
    model, training = MODEL_DEFAULTS.get(kind, "mlp"), dict(TRAINING_DEFAULTS.get(kind, {"kind": "sgd"}))
    return f"Default model: [{model}](../model/{model}.md). Default local training: {in_yaml(training)}.\n\n"


def _fields(schema: Schema, definitions: dict[str, Schema], root: str) -> str:
    """Return the table of a section, then those of the sections in it that no registry has."""
    text, waiting, done = f"{table(schema, root)}\n", list(references(schema.get("properties"))), set[str]()
    while waiting:
        name = waiting.pop(0)
        if name in done or not name[0].isupper():
            continue
        done.add(name)
        waiting += references(definitions[name].get("properties"))
        text += f"\n## {name}\n\n{prose(definitions[name]['description'])}\n\n{table(definitions[name], root)}\n"
    return text


def _doc(cls: type[BaseModel]) -> str:
    return prose(inspect.getdoc(cls) or "")


def _summary(cls: type[BaseModel]) -> str:
    return _doc(cls).split("\n")[0]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
