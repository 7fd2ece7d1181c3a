"""The actor that runs the rounds next to the client hosts, and streams what they give."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import ray

from narrowcast.cluster.failure import FailurePolicy
from narrowcast.cluster.hosts import Hosts, Wish
from narrowcast.cluster.key_service import RemoteVault, start_key_service
from narrowcast.cluster.metrics import Metered, RunMetrics
from narrowcast.cluster.ray_executor import RayExecutor
from narrowcast.platform.contracts import Algorithm, Executor, KeepsSecrets, Task
from narrowcast.platform.plan import Plan
from narrowcast.platform.play import play
from narrowcast.platform.rounds import Outcome
from narrowcast.platform.state import Interrupted, RunState

_SECONDS_HELD = 0.1  # handing a round on takes the driver milliseconds in which its hosts wait
_SECONDS_FOR_ALL = 20.0  # before round 1 starts with the hosts that are ready by then


@dataclass
class HandedOn:
    """Rounds that were played, what failed meanwhile, and, where the driver was asked to stop, what the last left."""

    outcomes: list[Outcome] = field(default_factory=list)
    incidents: list[str] = field(default_factory=list)
    stopped: RunState | None = None


@ray.remote(num_cpus=0, concurrency_groups={"stop": 1})  # type: ignore[call-overload]
class Driver:
    """Owns the client hosts of a run; dies with the process that started it."""

    def __init__(self, shared: list[ray.ObjectRef[Any]], wish: Wish, policy: FailurePolicy) -> None:
        # References inside a list arrive as references, so that the hosts read the same objects.
        algorithm, task = shared
        self._algorithm: Algorithm = ray.get(algorithm)
        self._task: Task = ray.get(task)
        keeps_secrets = isinstance(self._algorithm, KeepsSecrets)
        self._vault = start_key_service(algorithm) if keeps_secrets else None
        self._hosts = Hosts(wish, algorithm, task, self._vault)
        self._policy = policy
        self._stopping = threading.Event()

    @ray.method(concurrency_group="stop")
    def stop(self) -> None:
        """Give up the round under way, from beside `play`, which then hands on what the last one left and ends."""
        self._stopping.set()
        self._hosts.kill()

    def run(self, plan: Plan, state: RunState) -> Generator[HandedOn, None, None]:
        """Play the rounds that `state` has not seen, and hand them on a few at a time with what failed meanwhile."""
        self._hosts.wait(_SECONDS_FOR_ALL)
        pool = RayExecutor(self._hosts, self._policy, self._stopping)
        pool.settled_round = state.settled_round
        played, handed_on = HandedOn(), time.monotonic()
        metrics = RunMetrics(plan.name)
        executor: Executor = Metered(pool, metrics)
        if isinstance(self._algorithm, KeepsSecrets):
            executor = self._algorithm.over(executor, RemoteVault(self._vault), self._task)
        try:
            for outcome in play(plan, self._algorithm, self._task, executor, state):
                metrics.secured_algorithm(outcome)
                played.outcomes.append(outcome)
                if outcome.state is not None or time.monotonic() - handed_on > _SECONDS_HELD:
                    played.incidents, pool.incidents = pool.incidents, []
                    yield played
                    played, handed_on = HandedOn(), time.monotonic()
        except Interrupted as stop:
            played.stopped = stop.states[0]
        played.incidents = pool.incidents
        yield played
