"""The settings of finished runs by dotted path, and where they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowcast.platform.config import flatten, not_a_mapping, read_yaml
from narrowcast.platform.errors import UserError
from narrowcast.platform.links import own_file
from narrowcast.platform.tracking import units
from narrowcast.platform.yaml_limits import read_limited
from narrowcast.runs.run_folder import CONFIG

SEEDS = ("seed", "data.seed", "client_seed")
"""The settings in which repetitions of one experiment may differ."""
_LONGEST = 40  # characters of a value in a table
_NOT_SETTINGS = ("name", "tracking", "backend", "evaluate_clients")


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the run's settings by dotted path, read as they are written, without importing what they name."""
    path = own_file(folder, CONFIG)
    values = read_yaml(read_limited(path), str(path)) if path.is_file() else {}
    if not isinstance(values, Mapping):
        raise UserError(f"{path}: {not_a_mapping(values)}")
    return flatten({name: value for name, value in values.items() if name not in _NOT_SETTINGS})


def differing_settings(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the dotted paths whose values are not the same in all runs."""
    paths = dict.fromkeys(path for each in settings for path in each)
    return [path for path in paths if len({str(each.get(path)) for each in settings}) > 1]


def shown_setting(value: object) -> str:
    """Return the value of a setting for a table, a dash if there is none."""
    text = units.NOT_KNOWN if value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def codec_kinds(settings: Mapping[str, Any]) -> list[str]:
    """Return the kinds of the codec's stages."""
    kinds = list(settings.get("algorithm.codec") or ())
    while kind := settings.get(f"algorithm.codec.{len(kinds)}.kind", settings.get(f"algorithm.codec.{len(kinds)}")):
        kinds.append(kind)
    return kinds
