"""The loop that a plan asks for."""

from __future__ import annotations

from collections.abc import Generator

from narrowcast.platform.contracts import Algorithm, Executor, Task
from narrowcast.platform.rounds import Outcome, Plan, RunState, rounds


def play(
    plan: Plan, algorithm: Algorithm, task: Task, executor: Executor, state: RunState
) -> Generator[Outcome, None, None]:
    """Play what `state` has not seen yet."""
    return rounds(plan, algorithm, task, executor, state)
