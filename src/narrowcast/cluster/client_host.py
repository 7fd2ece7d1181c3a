"""The actor that hosts clients, and the pool of such actors that trains the chunks of a round."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

from narrowcast.cluster.failure import FailureBudget
from narrowcast.cluster.placement import deal
from narrowcast.platform.chunk_training import train_chunk
from narrowcast.platform.contracts import Algorithm, Task
from narrowcast.platform.errors import RunFailed
from narrowcast.platform.threads import one_thread
from narrowcast.platform.types import Arrays, Chunk, ChunkResult

logger = logging.getLogger(__name__)


_BYTES_IN_A_CALL = 64 * 1024


@ray.remote
class ClientHost:
    """Hosts clients: their data and profiles lie in the object store, their state travels with each call.

    A host keeps nothing between rounds, so a killed one is replaced without losing what its clients learnt.
    """

    def __init__(self, algorithm: Algorithm, task: Task) -> None:
        self._algorithm = algorithm
        self._task = task

    def ready(self) -> bool:
        """Answer once the host can train."""
        return True

    def train(self, broadcast: Arrays, chunks: list[Chunk]) -> list[ChunkResult]:
        """Train some of a round's chunks."""
        with one_thread():
            return [train_chunk(self._algorithm, broadcast, chunk, self._task) for chunk in chunks]


class HostPool:
    """Trains the chunks of each round on a fixed number of hosts, one call per host and round.

    A host that dies or does not answer in time is replaced and its chunks are trained again; since a chunk's result
    depends only on the chunk, so does the run's.
    """

    def __init__(
        self,
        algorithm: ray.ObjectRef[Any],
        task: ray.ObjectRef[Any],
        hosts: int,
        cpus: float,
        gpus: float,
        budget: FailureBudget,
    ) -> None:
        self._arguments = (algorithm, task)
        self._resources = {"num_cpus": cpus, "num_gpus": gpus}
        self._budget = budget
        self._hosts = [self._start() for _ in range(hosts)]

    def _start(self) -> Any:
        return ClientHost.options(**self._resources).remote(*self._arguments)  # type: ignore[attr-defined]

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """Train all chunks of a round and return their results in the order of the chunks."""
        shared = _shared(broadcast)
        results: dict[int, ChunkResult] = {}
        calls: dict[ray.ObjectRef[Any], tuple[int, list[Chunk]]] = {}
        for host, part in enumerate(deal(chunks, len(self._hosts))):
            if part:
                calls[self._hosts[host].train.remote(shared, part)] = (host, part)
        deadline = time.monotonic() + self._budget.round_timeout_seconds
        if self._collect_all(list(calls), results):
            return [results[chunk.index] for chunk in chunks]
        while calls:
            ready, _ = ray.wait(list(calls), timeout=max(0.0, deadline - time.monotonic()))
            if ready:
                host, part = calls.pop(ready[0])
                problem = self._collect(ready[0], results)
            else:
                host, part = calls.pop(next(iter(calls)))
                problem = f"no answer within {self._budget.round_timeout_seconds:g} s"
                deadline = time.monotonic() + self._budget.round_timeout_seconds
            if problem:
                self._budget = self._budget.spend(problem)
                logger.warning(
                    "round %d: client host %d: %s; its chunks start over",
                    chunks[0].round_index,
                    host,
                    problem,
                )
                ray.kill(self._hosts[host])
                self._hosts[host] = self._start()
                calls[self._hosts[host].train.remote(shared, part)] = (host, part)
        return [results[chunk.index] for chunk in chunks]

    def _collect_all(self, calls: list[ray.ObjectRef[Any]], results: dict[int, ChunkResult]) -> bool:
        """Keep the results of all calls at once, milliseconds sooner than one by one; whether nothing went wrong."""
        try:
            for part in ray.get(calls, timeout=self._budget.round_timeout_seconds):
                results |= {result.index: result for result in part}
        except (RayActorError, ObjectLostError, RayTaskError, GetTimeoutError):
            return False
        return True

    @staticmethod
    def _collect(call: ray.ObjectRef[Any], results: dict[int, ChunkResult]) -> str:
        """Keep the results of a call; what went wrong, or nothing."""
        try:
            results |= {result.index: result for result in ray.get(call)}
        except (RayActorError, ObjectLostError) as error:
            return type(error).__name__
        except RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, RunFailed) else RunFailed(f"a client host failed: {cause!r}")) from error
        return ""


def _shared(broadcast: Arrays) -> Any:
    """What all hosts read: one object in the store, or, where it is small, a copy in each call, which is quicker."""
    size = sum(values.nbytes for values in broadcast.values())
    return dict(broadcast) if size <= _BYTES_IN_A_CALL else ray.put(dict(broadcast))
