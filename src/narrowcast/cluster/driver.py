"""The actor that runs the rounds next to the client hosts, and streams what they give."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import ray

from narrowcast.cluster.client_host import HostPool
from narrowcast.cluster.failure import FailureBudget
from narrowcast.cluster.metrics import Metered, RunMetrics
from narrowcast.platform.contracts import Algorithm, Task
from narrowcast.platform.plan import Plan
from narrowcast.platform.play import play
from narrowcast.platform.rounds import Outcome
from narrowcast.platform.run_state import RunState

_SECONDS_HELD = 0.1  # handing a round on takes the driver milliseconds in which its hosts wait


@ray.remote(num_cpus=0)
class Driver:
    """Owns the client hosts of a run; dies with the process that started it."""

    def __init__(
        self,
        shared: list[ray.ObjectRef[Any]],
        hosts: int,
        cpus_per_host: float,
        gpus_per_host: float,
        budget: FailureBudget,
    ) -> None:
        # References inside a list arrive as references, so that the hosts read the same objects.
        algorithm, task = shared
        self._algorithm: Algorithm = ray.get(algorithm)
        self._task: Task = ray.get(task)
        self._pool = HostPool(algorithm, task, hosts, cpus_per_host, gpus_per_host, budget)

    def play(self, plan: Plan, state: RunState) -> Generator[list[Outcome], None, None]:
        """Play the rounds that `state` has not seen, and hand them on a few at a time."""
        played: list[Outcome] = []
        handed_on = time.monotonic()
        metrics = RunMetrics(plan.name)
        for outcome in play(plan, self._algorithm, self._task, Metered(self._pool, metrics), state):
            metrics.played(outcome)
            played.append(outcome)
            if outcome.state is not None or time.monotonic() - handed_on > _SECONDS_HELD:
                yield played
                played, handed_on = [], time.monotonic()
        if played:
            yield played
