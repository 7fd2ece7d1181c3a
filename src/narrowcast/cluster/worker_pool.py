"""Workers that run jobs as generators, and the loop that keeps them busy.

A job yields messages, and continues after the answer to each. A queue decides what to run, answer and repeat;
`dispatch` carries it out.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from narrowcast.platform.storage.host import STOPPING

_MESSAGE_SECONDS = 5.0
_POLL_SECONDS = 1.0
_ATTEMPTS = 3
"""Attempts at a job whose worker dies, which the job may cause by its memory."""

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


JobT = TypeVar("JobT")
KeyT = TypeVar("KeyT", bound=Hashable)


class JobQueue(ABC, Generic[JobT]):
    """Queue from which workers get their jobs."""

    @abstractmethod
    def next_job(self) -> JobT | None:
        """Return a job for a free worker; None if there is none now."""

    @abstractmethod
    def answer_to(self, message: Any) -> Any:
        """Process a job's message and return the answer to it."""

    @abstractmethod
    def worker_died(self, job: JobT, reason: str) -> None:
        """Process the loss of a job's worker."""

    def heartbeat(self) -> None:
        """Do what is due every few seconds; called at least that often."""
        return

    def is_finished(self) -> bool:
        """Return whether no jobs will come; called while no worker has one."""
        return True


class RetryQueue(JobQueue[JobT], Generic[JobT, KeyT]):
    """Jobs that this process alone knows of, by their keys; one whose worker dies is tried again, but not for ever."""

    def __init__(self, waiting: Iterable[KeyT]) -> None:
        self._waiting = deque(waiting)
        self._attempts = Counter[KeyT]()

    @abstractmethod
    def job(self, key: KeyT) -> JobT:
        """Return the job of a key, which begins."""

    @abstractmethod
    def key(self, job: JobT) -> KeyT:
        """Return the key of a job."""

    @abstractmethod
    def give_up(self, key: KeyT, reason: str) -> None:
        """Process the end of a job whose workers died too often."""

    def next_job(self) -> JobT | None:
        """Return the next job."""
        if not self._waiting:
            return None
        key = self._waiting.popleft()
        self._attempts[key] += 1
        return self.job(key)

    def worker_died(self, job: JobT, reason: str) -> None:
        """Queue the job again, or give it up."""
        if self._attempts[key := self.key(job)] < _ATTEMPTS:
            self._waiting.append(key)
        else:
            self.give_up(key, f"{reason}, {_ATTEMPTS} times")


def dispatch(queue: JobQueue[JobT], pool: WorkerPool, workers: int) -> None:
    """Run the queue's jobs on so many workers until it is finished."""
    free, running = list(range(workers)), dict[int, JobT]()
    while True:
        if STOPPING.is_set():
            raise KeyboardInterrupt  # Python may have lost the first one in a callback
        queue.heartbeat()
        while free and (job := queue.next_job()) is not None:
            running[free[0]] = job
            pool.start(free.pop(0), job)
        if not running:
            if queue.is_finished():
                return
            time.sleep(_POLL_SECONDS)
            continue
        if (received := pool.next_message(_MESSAGE_SECONDS)) is None:
            continue
        worker, message = received
        if isinstance(message, Done | WorkerDied):
            job = running.pop(worker)
            free.append(worker)
            if isinstance(message, WorkerDied):
                queue.worker_died(job, message.reason)
        else:
            pool.answer(worker, queue.answer_to(message))


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
