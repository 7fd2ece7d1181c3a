"""A worker pool of Ray actors, which share data by the object store; apart from `worker_pool`, as it imports Ray."""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import Any

import ray
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

from narrowcast.cluster.worker_pool import Done, JobFunction, WorkerDied
from narrowcast.platform.errors import RunFailed, UserError

logger = logging.getLogger(__name__)


@ray.remote
class _Worker:
    """Holds the generator of its job."""

    def __init__(self, function: JobFunction, shared: Any) -> None:
        self._function, self._shared = function, shared
        self._job: Generator[Any, Any, None] | None = None

    def start(self, job: Any) -> Any:
        self._job = self._function(job, self._shared)
        return self.resume(None)

    def resume(self, message: Any) -> Any:
        assert self._job is not None, "a job was started"
        try:
            return self._job.send(message)
        except StopIteration:
            self._job = None
            return Done()


class RayWorkerPool:
    """Actors on the cluster that this process has joined; an actor that dies is replaced."""

    def __init__(self, function: JobFunction, shared: Any, workers: int, *, cpus: float, gpus: float) -> None:
        self._arguments = (function, ray.put(shared))
        self._resources = {"num_cpus": cpus, "num_gpus": gpus}
        self._workers = [self._start_worker() for _ in range(workers)]
        self._calls: dict[ray.ObjectRef[Any], int] = {}

    def _start_worker(self) -> Any:
        return _Worker.options(**self._resources).remote(*self._arguments)  # type: ignore[attr-defined]

    def start(self, worker: int, job: Any) -> None:
        """Start a job on a free worker."""
        self._calls[self._workers[worker].start.remote(job)] = worker

    def answer(self, worker: int, message: Any) -> None:
        """Answer the last message of a worker, whose job then continues."""
        self._calls[self._workers[worker].resume.remote(message)] = worker

    def next_message(self, timeout_seconds: float) -> tuple[int, Any] | None:
        """Return a worker and its message, `Done` or `WorkerDied`; None if there is none within the timeout."""
        if not self._calls:
            return None
        ready, _ = ray.wait(list(self._calls), timeout=timeout_seconds)
        if not ready:
            return None
        worker = self._calls.pop(ready[0])
        try:
            return worker, ray.get(ready[0])
        except (RayActorError, ObjectLostError, OutOfMemoryError) as error:
            logger.warning("worker %d died (%s); another takes its place", worker, type(error).__name__)
            self._workers[worker] = self._start_worker()
            return worker, WorkerDied(f"its worker died ({type(error).__name__})")
        except RayTaskError as error:
            cause = error.cause
            expected = isinstance(cause, RunFailed | UserError)
            raise (cause if expected else RunFailed(f"a worker failed: {cause!r}")) from error
