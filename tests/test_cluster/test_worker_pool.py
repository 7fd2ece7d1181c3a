"""The queue of jobs that this process alone knows of: what its workers' deaths cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

from narrowcast.cluster.worker_pool import LocalPool, RetryQueue, WorkerDied, dispatch


class Squares(RetryQueue[tuple[str, int], str]):
    """Jobs that square a number each."""

    def __init__(self, numbers: dict[str, int]) -> None:
        super().__init__(numbers)
        self.numbers, self.squares, self.given_up = numbers, dict[str, int](), dict[str, str]()

    def job(self, key: str) -> tuple[str, int]:
        return key, self.numbers[key]

    def key(self, job: tuple[str, int]) -> str:
        return job[0]

    def answer_to(self, message: tuple[str, int]) -> None:
        self.squares[message[0]] = message[1]

    def give_up(self, key: str, reason: str) -> None:
        self.given_up[key] = reason


def square(job: tuple[str, int], shared: Counter[str]) -> Generator[tuple[str, int], None, None]:
    shared[job[0]] += 1
    yield job[0], job[1] ** 2


class Mortal(LocalPool):
    """A pool whose workers die at the end of the jobs named, so many times."""

    def __init__(self, deaths: dict[str, int]) -> None:
        self.begun, self.deaths, self.order = Counter[str](), Counter(deaths), list[str]()
        super().__init__(square, self.begun)

    def start(self, worker: int, job: tuple[str, int]) -> None:
        self.order.append(job[0])
        super().start(worker, job)

    def next_message(self, timeout_seconds: float) -> tuple[int, Any] | None:
        worker, message = super().next_message(timeout_seconds) or (0, None)
        if isinstance(message, tuple) and self.deaths[message[0]] > 0:
            self.deaths[message[0]] -= 1
            return worker, WorkerDied("killed")
        return worker, message


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_job_is_tried_three_times_after_those_that_wait(workers: int) -> None:
    queue, pool = Squares({"a": 2, "b": 3, "c": 4}), Mortal({"a": 2, "b": 9})
    dispatch(queue, pool, workers)
    assert queue.squares == {"a": 4, "c": 16}
    assert queue.given_up == {"b": "killed, 3 times"}
    assert pool.begun == {"a": 3, "b": 3, "c": 1}
    if workers == 1:
        assert pool.order == ["a", "b", "c", "a", "b", "a", "b"]


def test_jobs_that_end_are_asked_for_once() -> None:
    queue, pool = Squares({"a": 2, "b": 3}), Mortal({})
    dispatch(queue, pool, 1)
    assert (queue.squares, queue.given_up, pool.order) == ({"a": 4, "b": 9}, {}, ["a", "b"])
    assert queue.is_finished()
