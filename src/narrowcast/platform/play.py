"""The loop that a plan asks for."""

from __future__ import annotations

from collections.abc import Generator

from narrowcast.platform.asynchronous import buffered
from narrowcast.platform.contracts import Algorithm, Executor, Task
from narrowcast.platform.plan import Plan
from narrowcast.platform.rounds import Outcome, rounds
from narrowcast.platform.schedule import Buffered
from narrowcast.platform.state import RunState


def play(
    plan: Plan, algorithm: Algorithm, task: Task, executor: Executor, state: RunState
) -> Generator[Outcome, None, None]:
    """Play what `state` has not seen yet."""
    if isinstance(plan.schedule, Buffered):
        return buffered(plan, plan.schedule, algorithm, task, executor, state)
    return rounds(plan, algorithm, task, executor, state)
