"""Markdown tables of fields: type and range, unit, default and description, from their JSON Schema."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ruamel.yaml import YAML

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
        rows.append("| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |")
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
        return " or ".join(dict.fromkeys(type_of(each, root) for each in choices))
    if "enum" in field:
        return ", ".join(in_yaml(each) for each in field["enum"])
    match field.get("type"):
        case "array":
            items = field.get("prefixItems", [field.get("items", {})])
            said = "list of " + " and ".join(dict.fromkeys(type_of(each, root) for each in items))
        case "object":
            values = field.get("additionalProperties")
            said = f"section of {type_of(values, root)}" if isinstance(values, Mapping) else "section"
        case found:
            said = _WORDS.get(found, str(found)) + _range(field)
    return said


def _range(field: Schema) -> str:
    if {"minimum", "maximum"} <= field.keys():
        return f" from {_power(field['minimum'])} to {_power(field['maximum'])}"
    bounds = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
    said = [f"{sign} {_power(field[key])}" for key, sign in bounds if key in field]
    return " " + " and ".join(said) if said else ""


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
        for each in schema.values():
            yield from references(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from references(each)


def prose(text: str) -> str:
    """Return plain text with `code` as Markdown: all other marks stand for themselves."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*<\[\]$#])", r"\\\1", part) for part in parts)
