"""The actor that runs the rounds next to the client hosts, and streams their outcomes."""

from __future__ import annotations

import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import ray

from narrowcast.cluster.failure import FailurePolicy
from narrowcast.cluster.hosts import Hosts, PlacementRequest
from narrowcast.cluster.key_service import RemoteKeyStore, start_key_service
from narrowcast.cluster.metrics import Metered, RunMetrics
from narrowcast.cluster.ray_executor import RayExecutor
from narrowcast.platform.contracts import Executor
from narrowcast.platform.host_time import host_time
from narrowcast.platform.outcome import Outcome
from narrowcast.platform.rounds import rounds
from narrowcast.platform.run import Run
from narrowcast.platform.secure_contracts import check_answered
from narrowcast.platform.state import Interrupted, RunState

_BATCH_SECONDS = 0.1  # sending a batch of rounds takes the driver milliseconds in which its hosts wait
_START_SECONDS = 20.0  # for all hosts to start; then round 1 begins with those that are ready


@dataclass
class Batch:
    """Consecutive rounds with the failures during them; `stopped` is the last state if the driver was asked to stop."""

    outcomes: list[Outcome] = field(default_factory=list)
    incidents: list[str] = field(default_factory=list)
    stopped: RunState | None = None


@ray.remote(num_cpus=0, concurrency_groups={"stop": 1})  # type: ignore[call-overload]
class Driver:
    """Owns the client hosts of a run; dies with the process that started it."""

    def __init__(self, shared: list[ray.ObjectRef[Any]], request: PlacementRequest, policy: FailurePolicy) -> None:
        # A reference inside a list arrives as a reference, so that the hosts read the same object.
        (run,) = shared
        self._run: Run = ray.get(run)
        self._secure = self._run.algorithm.secure_sums
        self._key_service = None if self._secure is None else start_key_service(self._secure, self._run.answered)
        self._hosts = Hosts(request, run, self._key_service)
        self._policy = policy
        self._stopping = threading.Event()

    @ray.method(concurrency_group="stop")
    def stop(self) -> None:
        """Abandon the round in progress; `run` then yields the state after the last finished round and ends."""
        self._stopping.set()
        self._hosts.kill()

    def run(self, state: RunState) -> Generator[Batch, None, None]:
        """Run the rounds after `state` and yield them a few at a time with the failures during them."""
        self._hosts.wait(_START_SECONDS)
        pool = RayExecutor(self._run, self._hosts, self._policy, self._stopping)
        batch, sent_at = Batch(), host_time().monotonic()
        metrics = RunMetrics(self._run.plan.name)
        executor: Executor = Metered(pool, metrics)
        secure = self._secure and self._secure.rounds(RemoteKeyStore(self._key_service), self._run.task)
        pool.settled_round = state.settled_round
        if secure is not None:
            check_answered(secure, self._run.answered, state.settled_round)
            pool.settled_round = max(state.settled_round, secure.answered_round)
        try:
            for outcome in rounds(self._run, executor, state, secure):
                metrics.record(outcome)
                batch.outcomes.append(outcome)
                if outcome.state is not None or host_time().monotonic() - sent_at > _BATCH_SECONDS:
                    batch.incidents, pool.incidents = pool.incidents, []
                    yield batch
                    batch, sent_at = Batch(), host_time().monotonic()
        except Interrupted as stop:
            (stopped,) = stop.states
            assert isinstance(stopped, RunState), "these are rounds"
            batch.stopped = stopped
        batch.incidents = pool.incidents
        yield batch
