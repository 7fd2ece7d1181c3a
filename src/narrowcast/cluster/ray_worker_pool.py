"""Actors that do work step by step, such as the trials of a study; what all of them read lies in the object store."""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import Any

import ray
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

from narrowcast.cluster.worker_pool import Lost, Over, Play
from narrowcast.platform.errors import RunFailed, UserError

logger = logging.getLogger(__name__)


@ray.remote
class _StepHost:
    """One place: keeps the generator of the job that it is at."""

    def __init__(self, play: Play, shared: Any) -> None:
        self._play, self._shared = play, shared
        self._steps: Generator[Any, Any, None] | None = None

    def begin(self, job: Any) -> Any:
        self._steps = self._play(job, self._shared)
        return self.step(None)

    def step(self, message: Any) -> Any:
        assert self._steps is not None, "begun before"
        try:
            return self._steps.send(message)
        except StopIteration:
            self._steps = None
            return Over()


class StepHosts:
    """A fixed number of places on a cluster that was joined before; a place that dies is started again."""

    def __init__(self, play: Play, shared: Any, places: int, cpus: float, gpus: float) -> None:
        self._arguments = (play, ray.put(shared))
        self._resources = {"num_cpus": cpus, "num_gpus": gpus}
        self._hosts = [self._start() for _ in range(places)]
        self._calls: dict[ray.ObjectRef[Any], int] = {}

    def _start(self) -> Any:
        return _StepHost.options(**self._resources).remote(*self._arguments)  # type: ignore[attr-defined]

    def begin(self, place: int, job: Any) -> None:
        """Start a job at a free place."""
        self._calls[self._hosts[place].begin.remote(job)] = place

    def answer(self, place: int, message: Any) -> None:
        """Let the job at a place go on after the step that it gave."""
        self._calls[self._hosts[place].step.remote(message)] = place

    def next(self, timeout_seconds: float) -> tuple[int, Any] | None:
        """A place and its next step, `Over` or `Lost`; None where nothing comes in time."""
        if not self._calls:
            return None
        ready, _ = ray.wait(list(self._calls), timeout=timeout_seconds)
        if not ready:
            return None
        place = self._calls.pop(ready[0])
        try:
            return place, ray.get(ready[0])
        except (RayActorError, ObjectLostError, OutOfMemoryError) as error:
            logger.warning("worker %d died (%s); another takes its place", place, type(error).__name__)
            self._hosts[place] = self._start()
            return place, Lost(f"its worker died ({type(error).__name__})")
        except RayTaskError as error:
            cause = error.cause
            expected = isinstance(cause, RunFailed | UserError)
            raise (cause if expected else RunFailed(f"a worker failed: {cause!r}")) from error
