"""Workers that run a job as a generator: each message is answered before the job continues, until it is done."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

JobFunction = Callable[[Any, Any], Generator[Any, Any, None]]
"""Starts a job; the second argument is what all workers share. It yields messages and is sent the answers."""


@dataclass(frozen=True)
class Done:
    """The worker has finished its job."""


@dataclass(frozen=True)
class WorkerDied:
    """The worker died during its job; another one has taken its place."""

    reason: str


class WorkerPool(Protocol):
    """A fixed number of workers, each with one job at a time."""

    def start(self, worker: int, job: Any) -> None:
        """Start a job on a free worker."""
        ...

    def answer(self, worker: int, message: Any) -> None:
        """Answer the last message of a worker, whose job then continues."""
        ...

    def next_message(self, timeout_seconds: float) -> tuple[int, Any] | None:
        """Return a worker and its message, `Done` or `WorkerDied`; None if there is none within the timeout."""
        ...


class LocalPool:
    """Workers in this process, which take turns."""

    def __init__(self, function: JobFunction, shared: Any) -> None:
        self._function, self._shared = function, shared
        self._jobs: dict[int, Generator[Any, Any, None]] = {}
        self._answers: list[tuple[int, Any]] = []

    def start(self, worker: int, job: Any) -> None:
        """Start a job on a free worker."""
        self._jobs[worker] = self._function(job, self._shared)
        self._answers.append((worker, None))

    def answer(self, worker: int, message: Any) -> None:
        """Answer the last message of a worker, whose job then continues."""
        self._answers.append((worker, message))

    def next_message(self, timeout_seconds: float) -> tuple[int, Any] | None:
        """Continue a job up to its next message, however long that takes."""
        del timeout_seconds
        if not self._answers:
            return None
        worker, message = self._answers.pop(0)
        try:
            return worker, self._jobs[worker].send(message)
        except StopIteration:
            return worker, Done()
