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
    """Environment variables, unless the user sets them, and log levels, while a block of any thread is open."""

    def __init__(self, variables: Mapping[str, str], log_levels: Mapping[str, int] | None = None) -> None:
        self._variables, self._log_levels = variables, log_levels or {}
        self._lock, self._open_blocks = threading.Lock(), 0
        self._added: list[str] = []
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
        self._added = [name for name in self._variables if name not in os.environ]
        os.environ.update({name: self._variables[name] for name in self._added})
        self._levels_before = {name: logging.getLogger(name).level for name in self._log_levels}
        for name, level in self._log_levels.items():
            logging.getLogger(name).setLevel(level)

    def _restore(self) -> None:
        for name in self._added:
            if os.environ.get(name) == self._variables[name]:
                del os.environ[name]
        for name, level in self._levels_before.items():
            logging.getLogger(name).setLevel(level)
