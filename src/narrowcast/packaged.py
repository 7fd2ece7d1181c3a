"""Experiment and study files: packaged ones by name, the user's own by path."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from narrowcast.platform.config.files import apply_overrides, command, not_a_mapping, suggest
from narrowcast.platform.config.kinds import plain_values
from narrowcast.platform.config.yaml import read_limited, read_yaml
from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking.units import counted

EXPERIMENTS = files("narrowcast") / "experiments"
STUDIES = EXPERIMENTS / "studies"
SOLVES = EXPERIMENTS / "solves"
BENCHMARKS = EXPERIMENTS / "benchmarks"
_SECTIONS = ("algorithm", "data", "model")
_STEPS = ("round", "iteration")


def summaries(folder: Traversable) -> dict[str, str]:
    """Return the names of a folder's YAML files with the first comment line of each."""
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".yaml")), key=lambda entry: entry.name)
    return {entry.name.removesuffix(".yaml"): entry.read_text().splitlines()[0].lstrip("# ") for entry in files}


def read(name_or_path: str, folder: Traversable, what: str) -> tuple[str, str]:
    """Return the text of a packaged file or of a path, and its origin; raise `UserError` if there is neither."""
    if not name_or_path.strip():
        raise UserError(f"the name of the {what} is empty; give a packaged one (narrowcast show) or a YAML file")
    packaged = folder / f"{name_or_path}.yaml"
    if "/" not in name_or_path and packaged.is_file():
        return packaged.read_text(), f"{name_or_path}.yaml"
    path = Path(name_or_path)
    try:
        return read_limited(path), str(path)
    except FileNotFoundError:
        _refuse_other(name_or_path, what)
        known = [*summaries(folder), *(summaries(SOLVES) if what == "experiment" else ())]
        raise UserError(
            f'no {what} "{name_or_path}": neither a file nor a packaged {what}; packaged: '
            f"{', '.join(known)}{suggest(name_or_path, known)}"
        ) from None
    except OSError as error:
        if (path / "config.yaml").is_file():
            raise UserError(
                f"{path} is the folder of a run; to run its experiment again give {path}/config.yaml, to resume it use "
                + command("run", "--resume", path.name, "--output", path.parent)
            ) from error
        article = "an" if what == "experiment" else "a"
        raise UserError(
            f"{path}: cannot be read as {article} {what} file ({error.strerror}); give a YAML file"
        ) from error


def _refuse_other(word: str, what: str) -> None:
    """Raise `UserError` for the name of a file of another kind, such as a study for an experiment, or an override."""
    if what == "experiment" and word in summaries(STUDIES):
        raise _is_a_study(word, word)
    if what in ("experiment", "study") and word in summaries(BENCHMARKS):
        raise is_a_benchmark(word, word)
    if what == "study" and word in summaries(EXPERIMENTS):
        raise is_an_experiment(word, word)
    if re.match(r"[\w.]+=", word):
        raise UserError(f'"{word}" is an override; name the {what} before it: a YAML file, or a packaged one')


def _is_a_study(origin: str, name: str) -> UserError:
    return UserError(f"{origin} is a study, not an experiment; tune it with: {command('tune', name)}")


def is_a_benchmark(origin: str, name: str) -> UserError:
    """Return the error for a benchmark in place of an experiment or a study."""
    return UserError(f"{origin} is a benchmark of solvers; run it with: {command('benchmark', name)}")


def is_an_experiment(origin: str, name: str) -> UserError:
    """Return the error for an experiment in place of a study."""
    return UserError(
        f"{origin} is an experiment, not a study; run it with: {command('run', name)}, or name it as "
        "experiment.base in a study"
    )


def read_values(source: str | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the values as written of the file of an experiment or solve, or of a packaged one, and its origin.

    A mapping, as Python gives it, has the values of a file.
    """
    if isinstance(source, Mapping):
        values, origin = plain_values(source), str(source.get("name", "experiment"))
    else:
        folder = SOLVES if (SOLVES / f"{source}.yaml").is_file() else EXPERIMENTS
        text, origin = read(source, folder, "experiment")
        values = read_yaml(text, origin)
    if not isinstance(values, dict):
        raise UserError(f"{origin}: {not_a_mapping(values)}")
    if values.keys() & {"study", "space"}:
        raise _is_a_study(origin, origin if isinstance(source, Mapping) else source)
    if values.keys() & {"problems", "solvers"}:
        raise is_a_benchmark(origin, origin if isinstance(source, Mapping) else source)
    return values, origin


def names_solve(source: str | Mapping[str, Any]) -> bool:
    """Return whether this is a solve rather than an experiment."""
    return not read_values(source)[0].keys().isdisjoint(("problem", "solver"))


def announcement(source: str, overrides: Sequence[str]) -> str:
    """Return what a run is in one line, before anything that takes seconds to import; empty if that is not readable."""
    try:
        values, origin = read_values(source)
        values = {"name": Path(origin).stem, **values}
        kinds = {section: _kind(values, section) for section in ("solver", "problem", *_SECTIONS, "backend")}
        values = apply_overrides(values, overrides)
    except UserError:
        return ""  # what is wrong is said when the file is validated
    kinds = {section: _kind(values, section) or former for section, former in kinds.items()}
    algorithm, data = kinds["solver"] or kinds["algorithm"], kinds["problem"] or kinds["data"]
    if not algorithm or not data:
        return ""
    parts = [f"{algorithm} on {data}"]
    parts += [f"model {kinds['model']}"] * bool(kinds["model"])
    parts += [counted(values[f"{step}s"], step) for step in _STEPS if isinstance(values.get(f"{step}s"), int)]
    parts += [f"backend {kinds['backend']}"] * bool(kinds["backend"])
    return f"{values['name']}: {', '.join(parts)}"


def _kind(values: Mapping[str, Any], section: str) -> str | None:
    value = values.get(section)
    value = value.get("kind") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else None


def read_experiment(source: str | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the values of `read_values`; the run is named after the file by default."""
    values, origin = read_values(source)
    values.setdefault("name", Path(origin).stem)
    return values, origin


def read_study(source: str, overrides: Sequence[str]) -> dict[str, Any] | None:
    """Return the values of a study, packaged or from a file; None if the source has no section `study`."""
    values = _read_section(source, STUDIES, "study")
    if values is None:
        return None
    for section in ("experiment", "solve"):
        if isinstance(values.get(section), str):
            values[section] = {"base": values[section]}
    return apply_overrides(values, overrides)


def read_benchmark(source: str, overrides: Sequence[str]) -> dict[str, Any] | None:
    """Return the values of a benchmark, packaged or from a file; None if the source has no section `problems`."""
    values = _read_section(source, BENCHMARKS, "problems")
    return None if values is None else apply_overrides(values, overrides)


def _read_section(source: str, folder: Traversable, section: str) -> dict[str, Any] | None:
    """Return the values of a file of the folder, or of a path; None if they have no such section."""
    packaged = folder / f"{source}.yaml"
    if "/" not in source and packaged.is_file():
        values = read_yaml(packaged.read_text(), source)
    else:
        values = read_yaml(read_limited(Path(source)), source) if Path(source).is_file() else None
    return values if isinstance(values, dict) and section in values else None
