"""Settings that a library reads from the environment, in force only while it is called.

A user's own process keeps its environment variables and its log levels once a run has ended.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


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
        self._variables_before = {name: each for name, each in users.items() if self._forced or each is None}
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
