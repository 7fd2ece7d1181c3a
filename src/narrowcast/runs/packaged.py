"""YAML files that come with narrowcast, and files of the user's own, found by the same word."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from narrowcast.platform.config import apply_overrides, read_yaml, suggest
from narrowcast.platform.errors import UserError

EXPERIMENTS = files("narrowcast") / "experiments"


def summaries(folder: Traversable) -> dict[str, str]:
    """The names of a folder's YAML files and what their first comment line says of them."""
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".yaml")), key=lambda entry: entry.name)
    return {entry.name.removesuffix(".yaml"): entry.read_text().splitlines()[0].lstrip("# ") for entry in files}


def read(name_or_path: str, folder: Traversable, what: str) -> tuple[str, str]:
    """The text of a packaged file or of a path, and where it comes from; `UserError` where there is neither."""
    packaged = folder / f"{name_or_path}.yaml"
    if "/" not in name_or_path and packaged.is_file():
        return packaged.read_text(), f"{name_or_path}.yaml"
    path = Path(name_or_path)
    try:
        return path.read_text(), str(path)
    except FileNotFoundError:
        known = list(summaries(folder))
        raise UserError(
            f'no {what} "{name_or_path}": neither a file nor a packaged {what}; packaged: '
            f"{', '.join(known)}{suggest(name_or_path, known)}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        article = "an" if what == "experiment" else "a"
        raise UserError(f"{path}: cannot be read as {article} {what} file: {error}") from error


def read_experiment(name_or_path: str) -> tuple[dict[str, Any], str]:
    """The values as they stand in a file or packaged experiment, named after it, and where they stand."""
    text, origin = read(name_or_path, EXPERIMENTS, "experiment")
    values = read_yaml(text, origin)
    if not isinstance(values, dict):
        raise UserError(f"{origin}: expected keys and values, got {type(values).__name__}")
    values.setdefault("name", Path(origin).stem)
    return values, origin


def read_study(source: str, overrides: Sequence[str]) -> dict[str, Any] | None:
    """The values of a study, its own file or a packaged one, by its section of that name; None for everything else."""
    packaged = EXPERIMENTS / "studies" / f"{source}.yaml"
    file = packaged if "/" not in source and packaged.is_file() else Path(source)
    values = read_yaml(file.read_text(), source) if file.is_file() else None
    return apply_overrides(values, overrides) if isinstance(values, dict) and "study" in values else None
