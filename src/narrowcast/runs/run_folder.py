"""The folder of a run: its path, whether it may be written, and whether it holds a run to resume."""

from __future__ import annotations

import io
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from narrowcast.platform import plugins
from narrowcast.platform.atomic_files import without_part, write_atomically
from narrowcast.platform.config import PLUGINS, START, write_yaml
from narrowcast.platform.disk import disk, make_folders, remove_tree
from narrowcast.platform.errors import UserError, shown
from narrowcast.platform.links import own_file

if TYPE_CHECKING:
    from narrowcast.runs.recordable import RunConfig

CONFIG, RESULT, ANSWER = "config.yaml", "result.json", "answer.safetensors"
ITERATIONS = "iterations.parquet"
_PATTERN = re.compile(r"[*?\[]")
_NUMBER = re.compile(r"[0-9a-f]{16}")
ANSWERED = "answered.jsonl"
"""The file with the answers of the clients under secure sums, if their keys are those of the run."""
_ANSWERED_BESIDE_KEYS = "answered.id"
_WRITTEN_BEFORE_ROUND_1 = {
    *("journal.jsonl", "tracking.json", "checkpoint", CONFIG, PLUGINS, START),
    *(ANSWERED, _ANSWERED_BESIDE_KEYS),
}


def find_run(run: object, output: Path) -> Path:
    """Return the folder of a run given by its name in the output folder, or by its own path."""
    if not isinstance(run, str | Path) or not str(run).strip():
        raise UserError(f"{shown(run)} is not a run; give its name in {output}, or the path of its folder")
    return output / run if (output / run).is_dir() or not Path(run).is_dir() else Path(run)


def runs_in(folder: Path, file: str = RESULT) -> list[Path]:
    """Return the folder of a run itself; of a folder of runs, such as a benchmark's, those that have the file."""
    within = (
        [] if (folder / CONFIG).is_file() else sorted((each.parent for each in folder.glob(f"*/{file}")), key=_natural)
    )
    return within or [folder]


def find_runs(given: Iterable[str | Path], output: Path, file: str = RESULT) -> list[Path]:
    """Return the folders of runs, each once: of names, paths, folders of several runs, and patterns such as `fedavg-*`.

    Of a pattern, only folders with the file; raise `UserError` if there is none.
    """
    found: dict[Path, Path] = {}
    for word in given:
        folder = find_run(word, output)
        folders = [folder] if folder.is_dir() or not _PATTERN.search(str(word)) else _matching(str(word), output, file)
        found |= {each.resolve(): each for folder in folders for each in runs_in(folder, file)}
    return list(found.values())


def _matching(pattern: str, output: Path, file: str) -> list[Path]:
    """Return the folders that match in the output folder, or else as a path, in natural order."""
    root = Path(pattern).anchor or "."
    for place in (output, Path(root)):
        with suppress(ValueError, NotImplementedError):  # a pattern that none can match, or an absolute one
            matching = list(place.glob(pattern if place == output else str(Path(pattern).relative_to(root))))
            if folders := [each for each in matching if any((run / file).is_file() for run in runs_in(each, file))]:
                return sorted(folders, key=_natural)
    there = ", ".join(each.name for each in sorted((each.parent for each in output.glob(f"*/{file}")), key=_natural))
    raise UserError(f"no finished run matches {pattern}; finished runs in {output}: {there or 'none'}")


def _natural(folder: Path) -> list[str | int]:
    """Return the key of an order in which seed-2 is before seed-10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(folder))]


def free_folder(output: Path, name: str) -> Path:
    """Return OUTPUT/NAME, or OUTPUT/NAME-2 and so on if that exists."""
    folder, number = output / name, 1
    while folder.exists():
        number += 1
        folder = output / f"{name}-{number}"
    return folder


def make_writable(folder: Path) -> None:
    """Create the folder; raise `UserError` if no file can be written in it."""
    try:
        make_folders(folder)
        with suppress(PermissionError):
            disk().sync(folder.parent)  # an earlier process may have died between its creation and this
        probe = folder / ".writable"
        disk().append(probe, b"")
        disk().remove(probe)
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror}); give another folder with --output") from error


def has_run(folder: Path) -> bool:
    """Return whether the folder holds a run to resume; remove one that stopped before its `config.yaml` was written."""
    if not folder.is_dir():
        return False
    names = {entry.name for entry in folder.iterdir()}
    if CONFIG not in names and set(map(without_part, names)) <= _WRITTEN_BEFORE_ROUND_1:
        remove_tree(folder)
        return False
    return True


def write_config(config: RunConfig, folder: Path) -> None:
    """Write `config.yaml`, every default filled in and no password, and the modules of the user's own classes."""
    text = io.StringIO()
    write_yaml(config.plain(), text)
    plugins.keep(config.plain(), folder / PLUGINS)
    write_atomically(folder / CONFIG, text.getvalue().encode())


def saved_config(folder: Path) -> str:
    """Return the path of a run's `config.yaml`; raise `UserError` if it is a link that leads out of the folder."""
    return str(own_file(folder, CONFIG))


def answered_file(folder: Path, keys: str | None) -> Path:
    """Return the file in which the clients of a run write down what they answer under secure aggregation.

    The path is absolute, since a process of another working directory may write the file. With keys made offline it is
    beside them, under a number that the run's folder has, and so outlives the folder.
    """
    if keys is None:
        return folder.absolute() / ANSWERED
    number = folder / _ANSWERED_BESIDE_KEYS
    if not number.exists():
        write_atomically(number, secrets.token_hex(8).encode())
    if not _NUMBER.fullmatch(text := number.read_text()):
        raise UserError(f"{number} does not have the number under which {keys} has this run's answers; start a new run")
    return Path(keys).absolute() / "answered" / f"{text}.jsonl"


def checkpoint_place(config: RunConfig, folder: Path) -> str:
    """Return the folder or URL of the run's checkpoints."""
    elsewhere = config.checkpoint_path
    return str(folder / "checkpoint") if elsewhere is None else f"{elsewhere}/{folder.name}"


def remove_local_checkpoints(config: RunConfig, folder: Path) -> None:
    """Remove the checkpoints of a finished run from this machine, if there are any."""
    with suppress(OSError):
        remove_tree(Path(checkpoint_place(config, folder)))
