"""Hundreds of runs within a time limit, one process each; killed at any moment, it loses the running ones only.

Finished runs are appended to OUTPUT/STUDY.csv, and runs that CSV files have are not repeated, so that the same call
goes on. MLflow, Ray and Optuna are not imported.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.studies.execution import light_runs, one_core_each
from narrowcast.studies.results import Rows, append
from narrowcast.studies.spec import RunSpec

_GUESS_SECONDS = 45.0


@dataclass(frozen=True)
class Planned:
    """One run of a study; without `test` its test metrics are not looked at.

    `per_user`: keep the hits of each test user, a kilobyte a run, which a bootstrap over users needs.
    """

    study: str
    spec: RunSpec
    seed: int
    test: bool = True
    per_user: bool = True


Plan = Callable[[Rows], Iterator[Planned]]
"""Yields the runs that a study needs, in order, as far as they are known from the rows that there are."""


class Queue:
    """The runs of plans that are not finished, in order, and an estimate of how long each takes."""

    def __init__(self, plans: Sequence[Plan], rows: Rows) -> None:
        self.plans, self.rows = plans, rows
        self.begun: set[tuple[str, int]] = set()

    def missing(self) -> Iterator[Planned]:
        """Yield the runs that are neither finished nor begun."""
        for plan in self.plans:
            for planned in plan(self.rows):
                begun = (planned.spec.label, planned.seed) in self.begun
                if not begun and (planned.spec, planned.seed) not in self.rows:
                    yield planned

    def next_job(self, planned: Planned) -> list[Planned]:
        """Return the missing runs that go in lockstep with this one, or this one alone."""
        if not (together := planned.spec.together):
            return [planned]
        found = [each for each in self.missing() if each.spec.together == together]
        return list({(each.spec.label, each.seed): each for each in found}.values())

    def seconds(self, planned: Planned) -> float:
        """Return how long a run takes: as the longest of its method so far, or a guess."""
        stem = planned.spec.label.rpartition("-")[0]
        return max((row["wall_seconds"] for row in self.rows.of_stem(stem)), default=_GUESS_SECONDS)

    def ended(self, planned: Planned, result: dict[str, Any]) -> None:
        """Count a run as finished."""
        packed = {name: value for name, value in result.items() if name != "hits"}
        self.rows[planned.spec, planned.seed] = packed


def work(queue: Queue, output: Path, workers: int, seconds: float, memory_gib: float) -> None:
    """Run what is missing until all is done or the time is up; a line for each run that ends."""
    end, ended = time.monotonic() + seconds, 0
    one_core_each()
    output.mkdir(parents=True, exist_ok=True)
    running = dict[Future[list[dict[str, Any]]], list[Planned]]()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # its workers are to end with it
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    try:
        while (left := end - time.monotonic()) > 0:
            for planned in queue.missing():
                if len(running) == workers:
                    break
                used = sum(each.spec.memory_gib for job in running.values() for each in job)
                job = queue.next_job(planned)
                needed = sum(each.spec.memory_gib for each in job)
                if sum(map(queue.seconds, job)) <= left and used + needed <= memory_gib:
                    queue.begun |= {(each.spec.label, each.seed) for each in job}
                    running[pool.submit(light_runs, [(each.spec, each.seed, each.test) for each in job])] = job
            if not running:
                break
            for future in wait(running, min(left, threading.TIMEOUT_MAX), FIRST_COMPLETED).done:
                job = running.pop(future)
                try:
                    results = future.result()
                except BrokenProcessPool:
                    raise RunFailed(
                        "a run's process was killed, perhaps for lack of memory; try fewer --jobs"
                    ) from None
                except UserError as error:
                    print(f"{job[0].spec.label}-seed-{job[0].seed} cannot run: {error}", flush=True)
                    continue
                for planned, result in zip(job, results, strict=True):
                    if not planned.per_user:
                        result.pop("hits", None)
                    append(output / f"{planned.study}.csv", planned.spec, planned.seed, result)
                    queue.ended(planned, result)
                    ended += 1
                    print(f"[{ended}, {end - time.monotonic():.0f} s left] {_line(planned, result)}", flush=True)
    finally:
        for process in multiprocessing.active_children():
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)
        signal.signal(signal.SIGTERM, before)
    print(f"{ended} runs ended, {sum(1 for _ in queue.missing())} of those that can be planned now are left")


def _line(planned: Planned, result: dict[str, Any]) -> str:
    final = {name: round(100 * each, 2) for name, each in result["final"].items()}
    return (
        f"{planned.spec.label}-seed-{planned.seed} {result.get('error') or final} {result.get('uplink_bits')} bits, "
        f"{result['wall_seconds']:.0f} s"
    )
