r"""Hundreds of runs within a time limit, one process each; killed at any moment, it loses the running ones only.

    python -m narrowcast.reproduce.long_runs tuning-ml1m decay-ml1m total-ml1m frontier-ml1m tuning-mnist \
        frontier-mnist decay-ml1m-3000 frontier-others --seconds 570 --workers 16 --results docs/results --output OUT

Runs of the first study named go first; a frontier starts with the methods whose tuning is finished. Finished runs are
appended to OUT/STUDY.csv. Runs that are in the CSV files of `--results` or OUT are not repeated. The same command with
`--merge` runs nothing and adds the rows of OUT to `--results`. MLflow, Ray and Optuna are not imported.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.reproduce.light_run import light_runs
from narrowcast.reproduce.long_studies import STUDIES, Planned
from narrowcast.reproduce.results_csv import Rows, append, read_rows
from narrowcast.reproduce.worker_threads import one_core_each

_GUESS_SECONDS = 45.0
_LARGEST_FILE_BYTES = 190_000
"""Of a file of results, which is in the repository."""


class Queue:
    """The runs of the studies that are not finished, in order, and an estimate of how long each takes."""

    def __init__(self, studies: Sequence[str], folders: Sequence[Path]) -> None:
        self.studies = studies
        self.rows: Rows = read_rows(folders)
        self.begun: set[tuple[str, int]] = set()

    def missing(self) -> Iterator[Planned]:
        """Yield the runs that are neither finished nor begun."""
        for study in self.studies:
            for planned in STUDIES[study](self.rows):
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
        times = [row["wall_seconds"] for row in self.rows.of_stem(stem)]
        return max(times, default=_GUESS_SECONDS)

    def ended(self, planned: Planned, result: dict[str, Any]) -> None:
        """Count a run as finished."""
        packed = {name: value for name, value in result.items() if name != "hits"}
        self.rows[planned.spec, planned.seed] = packed


def work(queue: Queue, output: Path, workers: int, seconds: float, memory_gib: float) -> None:
    """Run what is missing until all is done or the time is up."""
    end, ended = time.monotonic() + seconds, 0
    one_core_each()
    output.mkdir(parents=True, exist_ok=True)
    running = dict[Future[list[dict[str, Any]]], list[Planned]]()
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context)
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
                    raise RunFailed("a run's process was killed, perhaps for lack of memory; lower --memory") from None
                except UserError as error:
                    print(f"{job[0].spec.label}-seed-{job[0].seed} cannot run: {error}", flush=True)
                    continue
                for planned, result in zip(job, results, strict=True):
                    if not planned.per_user:
                        result.pop("hits", None)
                    append(output / f"{planned.study}.csv", planned.spec, planned.seed, result)
                    queue.ended(planned, result)
                    ended += 1
                    final = {name: round(100 * each, 2) for name, each in result["final"].items()}
                    print(
                        f"[{ended}, {end - time.monotonic():.0f} s left] {planned.spec.label}-seed-{planned.seed} "
                        f"{result.get('error') or final} {result.get('uplink_bits')} bits, "
                        f"{result['wall_seconds']:.0f} s",
                        flush=True,
                    )
    finally:
        for process in multiprocessing.active_children():
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)
    print(f"{ended} runs ended, {sum(1 for _ in queue.missing())} of those that can be planned now are left")


def merge(sources: Sequence[Path], target: Path) -> None:
    """Append to each file of `target` the rows of the same file in the sources that it lacks.

    Rows go on in NAME-2.csv and so on, each with its header, if a file has other columns or would grow above
    `_LARGEST_FILE_BYTES`.
    """
    for path in sorted(file for folder in sources for file in folder.glob("*.csv")):
        header, *rows = path.read_text().splitlines()
        parts = [target / path.name]
        while (following := target / f"{path.stem}-{len(parts) + 1}.csv").exists():
            parts.append(following)
        known = {line for part in parts if part.exists() for line in part.read_text().splitlines()}
        text = parts[-1].read_text() if parts[-1].exists() else f"{header}\n"
        for row in rows:
            if row in known:
                continue
            if not text.startswith(f"{header}\n") or len(text) + len(row) >= _LARGEST_FILE_BYTES:
                parts[-1].write_text(text)
                parts.append(target / f"{path.stem}-{len(parts) + 1}.csv")
                text = f"{header}\n"
            text += f"{row}\n"
        parts[-1].write_text(text)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", choices=list(STUDIES))
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after this time")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--memory", type=float, default=100.0, help="GiB for all runs together")
    parser.add_argument("--results", type=Path, default=Path("docs/results"), help="folder of finished results")
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="folder to append results to")
    parser.add_argument("--merge", action="store_true", help="run nothing; add the rows of OUTPUT to RESULTS")
    parser.add_argument("--list", action="store_true", help="run nothing; list the runs that are missing")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its workers are to end with it
    queue = Queue(given.studies, [given.results, given.output])
    if given.merge:
        merge([given.output], given.results)
    elif given.list:
        for planned in queue.missing():
            print(f"{planned.study} {planned.spec.label}-seed-{planned.seed} {queue.seconds(planned):.0f} s")
    else:
        work(queue, given.output, given.workers, given.seconds, given.memory)


if __name__ == "__main__":
    main()
