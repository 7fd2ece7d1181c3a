"""The rule of what runs code: running runs what a file names, looking never does, but in folders that the user trusts.

Trusted folders are kept in the user's own settings, and cover all that lies below them.

Settings that a library reads from the environment, in force only while it is called.

A user's own process keeps its environment variables and its log levels once a run has ended.
"""

from __future__ import annotations

import logging
import os
import shlex
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from narrowcast.platform.errors import UserError
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
    """Environment variables and log levels while a block of any thread is open.

    Variables that the user sets are left as they are, unless the settings are `forced`.
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
