"""Work that goes step by step and hears back after each: begun at a place, answered, until it is over."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

Play = Callable[[Any, Any], Generator[Any, Any, None]]
"""Makes the steps of a job; its second argument is what all jobs share."""


@dataclass(frozen=True)
class Over:
    """A place has done its job."""


@dataclass(frozen=True)
class Lost:
    """A place died in the middle of its job, and is there again."""

    reason: str


class Places(Protocol):
    """Where jobs are done, a job to a place at a time."""

    def begin(self, place: int, job: Any) -> None:
        """Start a job at a free place."""
        ...

    def answer(self, place: int, message: Any) -> None:
        """Let the job at a place go on after the step that it gave."""
        ...

    def next(self, timeout_seconds: float) -> tuple[int, Any] | None:
        """A place and its next step, `Over` or `Lost`; None where nothing comes in time."""
        ...


class Here:
    """The places of this process, which take turns."""

    def __init__(self, play: Play, shared: Any) -> None:
        self._play, self._shared = play, shared
        self._steps: dict[int, Generator[Any, Any, None]] = {}
        self._waiting: list[tuple[int, Any]] = []

    def begin(self, place: int, job: Any) -> None:
        """Start a job at a free place."""
        self._steps[place] = self._play(job, self._shared)
        self._waiting.append((place, None))

    def answer(self, place: int, message: Any) -> None:
        """Let the job at a place go on after the step that it gave."""
        self._waiting.append((place, message))

    def next(self, timeout_seconds: float) -> tuple[int, Any] | None:
        """Work until there is a step; there is no waiting for anyone else."""
        del timeout_seconds
        if not self._waiting:
            return None
        place, message = self._waiting.pop(0)
        try:
            return place, self._steps[place].send(message)
        except StopIteration:
            return place, Over()
