"""The folder of a run: where it is, whether it may be written or resumed, its tables, and its settings.

The settings of finished runs are read by dotted path, and compared to find where runs differ.
"""

from __future__ import annotations

import io
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError

from narrowcast.platform.config import plugins
from narrowcast.platform.config.files import PLUGINS, START, command, flatten, not_a_mapping
from narrowcast.platform.config.run_fields import Tracking
from narrowcast.platform.config.trust import own_file
from narrowcast.platform.config.yaml import read_limited, read_yaml, write_yaml
from narrowcast.platform.errors import UserError, shown
from narrowcast.platform.storage.disk import (
    disk,
    make_folders,
    read_tensors,
    remove_tree,
    without_part,
    write_atomically,
)
from narrowcast.platform.tracking import units
from narrowcast.platform.types import Arrays

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


class RunConfig(Protocol):
    """The model of a whole run, such as an experiment."""

    @property
    def name(self) -> str:
        """The name of the run."""
        ...

    @property
    def tracking(self) -> Tracking:
        """The MLflow store of the run."""
        ...

    @property
    def checkpoints_kept(self) -> int:
        """The number of checkpoints kept."""
        ...

    @property
    def checkpoint_path(self) -> str | None:
        """The folder of the checkpoints, None for that of the run."""
        ...

    def plain(self) -> dict[str, Any]:
        """Nested plain values, without secrets."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return the dotted values that results depend on."""
        ...

    def digest(self) -> str:
        """Return the sha256 of `identity`."""
        ...


def find_run(run: object, output: Path) -> Path:
    """Return the folder of a run given by its name in the output folder, or by its own path."""
    if not isinstance(run, str | Path) or not str(run).strip():
        raise UserError(f"{shown(run)} is not a run; give its name in {output}, or the path of its folder")
    return output / run if (output / run).is_dir() or not Path(run).is_dir() else Path(run)


def runs_in(folder: Path, file: str = RESULT) -> list[Path]:
    """Return the folder of a run itself; of a folder of runs, such as a benchmark's, those that have the file."""
    within = (
        [] if (folder / CONFIG).is_file() else sorted((path.parent for path in folder.glob(f"*/{file}")), key=_natural)
    )
    return within or [folder]


def find_runs(words: Iterable[str | Path], output: Path, file: str = RESULT) -> list[Path]:
    """Return the folders of runs, each once: of names, paths, folders of several runs, and patterns such as `fedavg-*`.

    Of a pattern, only folders with the file; raise `UserError` if there is none.
    """
    by_path: dict[Path, Path] = {}
    for word in words:
        folder = find_run(word, output)
        folders = [folder] if folder.is_dir() or not _PATTERN.search(str(word)) else _matching(str(word), output, file)
        by_path |= {path.resolve(): path for folder in folders for path in runs_in(folder, file)}
    return list(by_path.values())


def _matching(pattern: str, output: Path, file: str) -> list[Path]:
    """Return the folders that match in the output folder, or else as a path, in natural order."""
    root = Path(pattern).anchor or "."
    for parent in (output, Path(root)):
        with suppress(ValueError, NotImplementedError):  # a pattern that none can match, or an absolute one
            matching = list(parent.glob(pattern if parent == output else str(Path(pattern).relative_to(root))))
            if folders := [
                folder for folder in matching if any((run / file).is_file() for run in runs_in(folder, file))
            ]:
                return sorted(folders, key=_natural)
    finished = ", ".join(
        folder.name for folder in sorted((path.parent for path in output.glob(f"*/{file}")), key=_natural)
    )
    raise UserError(f"no finished run matches {pattern}; finished runs in {output}: {finished or 'none'}")


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


def read_table(path: Path, needed: tuple[str, ...]) -> pa.Table:
    """Return a Parquet table with the needed columns; raise `UserError` if it is damaged or lacks one."""
    own_file(path.parent, path.name)
    try:
        # Without partitioning=None a folder called lr=0.1 would become a column.
        table = pq.read_table(path, partitioning=None)
        table.validate(full=True)
        names = table.column_names
        for column in table.columns:
            if pa.types.is_integer(column.type):
                column.cast(pa.float64())  # refuses numbers that figures and tables could not show
    except (OSError, ValueError, TypeError, pa.ArrowException) as error:
        raise UserError(f"{path}: unreadable ({first_line(error)}); run the experiment again") from error
    if missing := [name for name in needed if name not in names]:
        raise UserError(f"{path}: has no column {', '.join(missing)}; run the experiment again")
    return table


def read_arrays(folder: Path, name: str, advice: str) -> Arrays:
    """Return the arrays of a safetensors file of a run; raise `UserError` with the advice if it is damaged."""
    path = own_file(folder, name)
    try:
        return read_tensors(path)[0]
    except (SafetensorError, OSError, TypeError, ValueError) as error:
        raise UserError(f"{path}: unreadable ({first_line(error)}); {advice}") from error


def finish_advice(folder: Path) -> str:
    """Return how to finish a run that was begun."""
    resume = command("run", "--resume", folder.name, "--output", folder.parent)
    return f"let it finish or resume it with: {resume}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


SEEDS = ("seed", "data.seed", "client_seed")
"""The settings in which repetitions of one experiment may differ."""
_OF_A_SEED = re.compile(r"-(seed|data\.seed|client_seed)-\d+")
_LONGEST = 40  # characters of a value in a table
_NOT_SETTINGS = ("name", "tracking", "backend", "evaluate_clients")


def without_seed(name: str) -> str:
    """Return the name of a replica without what tells the seeds apart, such as `-seed-0`."""
    return _OF_A_SEED.sub("", name)


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the run's settings by dotted path, read as they are written, without importing what they name."""
    path = own_file(folder, CONFIG)
    values = read_yaml(read_limited(path), str(path)) if path.is_file() else {}
    if not isinstance(values, Mapping):
        raise UserError(f"{path}: {not_a_mapping(values)}")
    return flatten({name: value for name, value in values.items() if name not in _NOT_SETTINGS})


def differing_settings(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the dotted paths whose values are not the same in all runs."""
    paths = dict.fromkeys(path for run_settings in settings for path in run_settings)
    return [path for path in paths if len({str(run_settings.get(path)) for run_settings in settings}) > 1]


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
