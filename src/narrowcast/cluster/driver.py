"""The actor that runs the rounds next to the client hosts, and streams what they give."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import ray

from narrowcast.cluster.client_host import HostPool
from narrowcast.cluster.failure import FailureBudget
from narrowcast.platform.contracts import Algorithm, Task
from narrowcast.platform.rounds import Outcome, Plan, RunState, rounds


@ray.remote(num_cpus=0)
class Driver:
    """Owns the client hosts of a run; dies with the process that started it."""

    def __init__(
        self, shared: list[ray.ObjectRef[Any]], hosts: int, cpus_per_host: float, budget: FailureBudget
    ) -> None:
        # References inside a list arrive as references, so that the hosts read the same objects.
        algorithm, task = shared
        self._algorithm: Algorithm = ray.get(algorithm)
        self._task: Task = ray.get(task)
        self._pool = HostPool(algorithm, task, hosts, cpus_per_host, budget)

    def play(self, plan: Plan, state: RunState) -> Generator[Outcome, None, None]:
        """Play the rounds that `state` has not seen."""
        yield from rounds(plan, self._algorithm, self._task, self._pool, state)
