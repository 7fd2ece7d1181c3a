"""The rule of what runs code: running a file runs what it names; looking at a file never does, but in trusted folders.

Trusted folders are kept in the user's own settings, and cover all that lies below them. Whatever is trusted, links that
lead out of a folder are not followed, since another person's may have them on any file. A link within the folder is as
good as a file, and so is a link to the whole folder, since the user has named that. JSON is read as plain values.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from narrowcast.platform.errors import UserError, warn_once
from narrowcast.platform.storage.disk import write_atomically

_looked_at: ContextVar[Path | None] = ContextVar("looked_at", default=None)


@contextmanager
def looking(folder: Path, *, trust: bool = False) -> Iterator[None]:
    """Import no module and start no program that a file names, unless it is trusted or lies in a trusted folder.

    `folder` is that of the file or run that is looked at.
    """
    allowed = trust or is_trusted(folder)
    token = _looked_at.set(None if allowed else folder)
    try:
        yield
    finally:
        _looked_at.reset(token)


def is_looking() -> bool:
    """Return whether code that files name must not run here."""
    return _looked_at.get() is not None


def check_may_run(named: str) -> None:
    """Raise `UserError` if code that a file names must not run here, since the file is only looked at."""
    if (folder := _looked_at.get()) is not None:
        raise UserError(f"{named} is code of the file's own, which looking does not run; {remedy(folder)}")


def remedy(folder: Path) -> str:
    """Return how the user lets code of this folder run."""
    return f"if you trust it, add --trust, or trust its folder for good: narrowcast trust {shlex.quote(str(folder))}"


def is_trusted(folder: Path) -> bool:
    """Return whether the folder, or one above it, is trusted."""
    resolved = folder.resolve()
    return any(resolved.is_relative_to(trusted) for trusted in trusted_folders())


def trusted_folders() -> list[Path]:
    """Return the folders that the user trusts; none if the settings are somebody else's, and never the root."""
    try:
        content = _settings().read_bytes()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    folders = (Path(os.fsdecode(line)) for line in content.split(b"\n"))
    return [folder for folder in folders if folder.is_absolute() and folder != Path(folder.anchor)]


def trust_folder(folder: Path) -> Path:
    """Trust a folder; return its path. Raise `UserError` if there is no such folder, or if it is the root."""
    resolved = folder.resolve()
    if not resolved.is_dir():
        raise UserError(f"{folder} is not a folder; name the folder of your experiments")
    if resolved == Path(resolved.anchor) or "\n" in str(resolved):
        raise UserError(f"{resolved} cannot be trusted as a whole; name the folder of your experiments")
    _write([*(path for path in trusted_folders() if path != resolved), resolved])
    return resolved


def forget_folder(folder: Path) -> Path:
    """Trust a folder no longer; return its path. Raise `UserError` if it is not among those that are trusted."""
    resolved, known = folder.resolve(), trusted_folders()
    if resolved not in known:
        raise UserError(f"{resolved} is not trusted; trusted: {', '.join(map(str, known)) or 'none'}")
    _write([path for path in known if path != resolved])
    return resolved


def _settings() -> Path:
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder) / "narrowcast" / "trusted_folders"


def _write(folders: list[Path]) -> None:
    file = _settings()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, b"".join(os.fsencode(folder) + b"\n" for folder in folders))
    except OSError as error:
        raise UserError(
            f"{file} cannot be written ({error.strerror}); set XDG_CONFIG_HOME to a folder that can"
        ) from error


class ScopedSettings:
    """Settings that a library reads from the environment: variables and log levels while a block of any thread is open.

    Variables that the user sets are left as they are, unless the settings are `forced`. A user's own process has its
    environment variables and its log levels back once a run has ended.
    """

    def __init__(
        self, variables: Mapping[str, str], log_levels: Mapping[str, int] | None = None, *, forced: bool = False
    ) -> None:
        self._variables, self._log_levels, self._forced = variables, log_levels or {}, forced
        self._lock, self._open_blocks = threading.Lock(), 0
        self._variables_before: dict[str, str | None] = {}
        self._levels_before: dict[str, int] = {}

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Apply the settings within the block, or as a decorator within each call of a function."""
        with self._lock:
            if not self._open_blocks:
                self._apply()
            self._open_blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._open_blocks -= 1
                if not self._open_blocks:
                    self._restore()

    def _apply(self) -> None:
        users = {name: os.environ.get(name) for name in self._variables}
        self._variables_before = {name: value for name, value in users.items() if self._forced or value is None}
        os.environ.update({name: self._variables[name] for name in self._variables_before})
        self._levels_before = {name: logging.getLogger(name).level for name in self._log_levels}
        for name, level in self._log_levels.items():
            logging.getLogger(name).setLevel(level)

    def _restore(self) -> None:
        for name, before in self._variables_before.items():
            if os.environ.get(name) != self._variables[name]:
                continue  # another block, or the user, has set it since
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
        for name, level in self._levels_before.items():
            logging.getLogger(name).setLevel(level)


logger = logging.getLogger(__name__)


def leads_out(path: Path, folder: Path) -> bool:
    """Return whether a path below the folder is another place, by a link or by `..`."""
    return not _real(path).is_relative_to(_real(folder))


def own_file(folder: Path, name: str) -> Path:
    """Return the path of a file of the folder, which need not exist; raise `UserError` if a link leads out of it."""
    path = folder / name
    if leads_out(path, folder):
        raise UserError(
            f"{path} is a link to {_real(path)}, outside its folder, and is not followed; put the file itself there"
        )
    return path


def own_files(folder: Path) -> list[Path]:
    """Return the files of the folder and of those below it, sorted, without links that lead out, which are logged."""
    files = []
    for path in sorted(folder.rglob("*")):
        if leads_out(path, folder):
            warn_once(logger, f"{path} is a link to {_real(path)}, outside its folder, and is left out")
        elif path.is_file():
            files.append(path)
    return files


def check_shipped(files: Iterable[tuple[str, Path]], source: str, overrides: Iterable[str]) -> None:
    """Raise `UserError` if a file that is to be sent with an experiment lies elsewhere, by the word of its file alone.

    The folder of the experiment's file may be left by the user's own word: an override, or trust in the folder. `files`
    are the settings that name a file, and its path; `source` is the file of the experiment, or no file.
    """
    if not Path(source).is_file():
        return  # a packaged experiment names no files, so that these are from overrides
    folder, text = Path(source).resolve().parent, "\n".join(overrides)
    for setting, path in files:
        if leads_out(path, folder) and not is_trusted(folder) and not _names(text, path):
            raise UserError(
                f"{setting} = {path}: is not below {folder}, the folder of {Path(source).name}, and would be sent with "
                "it; put it there, give it as an override, or trust the folder: narrowcast trust FOLDER"
            )


def _names(text: str, path: Path) -> bool:
    """Return whether a text of YAML has the path, and not one that begins or ends as it does."""
    return re.search(rf"""(?<![^\s=:,"'{{[])(\./)*{re.escape(str(path))}(?![^\s,"'}}\]])""", text) is not None


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # which, unlike `resolve`, takes links in a circle


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Return the object in a JSON file; raise `UserError` with the remedy if it is unreadable or no object."""
    own_file(path.parent, path.name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: unreadable ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected an object, got {type(content).__name__}; {remedy}")
    return content
