"""Plays plans in this process."""

from __future__ import annotations

from narrowcast.platform.contracts import Algorithm, Executor, Task
from narrowcast.platform.local_backend import LocalExecutor
from narrowcast.platform.play import play as play_plan
from narrowcast.platform.rounds import Outcome, Plan, RunState, model_sha256, start


def play(
    plan: Plan, algorithm: Algorithm, task: Task, state: RunState | None = None, executor: Executor | None = None
) -> list[Outcome]:
    executor = executor or LocalExecutor(algorithm, task)
    return list(play_plan(plan, algorithm, task, executor, state or start(algorithm, task)))


def sha256(algorithm: Algorithm, outcomes: list[Outcome]) -> str:
    state = outcomes[-1].state
    assert state is not None
    return model_sha256(algorithm, state)
