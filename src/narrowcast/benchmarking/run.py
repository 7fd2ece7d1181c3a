"""The run of a benchmark, from its checks to its result: instances, the workers that solve them, and the display.

Instances run side by side, and those that have ended are left out. The rest are the queue from which `dispatch` gives
workers their jobs. A worker solves an instance as a new or resumed run in the benchmark's folder.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.status import Status

from narrowcast.benchmarking.file import TABLE, Benchmark, BenchmarkFolder, Instance
from narrowcast.benchmarking.result import BenchmarkResult, as_csv, result_of
from narrowcast.cluster.backend import RayBackend
from narrowcast.cluster.worker_pool import LocalPool, RetryQueue, WorkerPool, dispatch
from narrowcast.platform.compiled import one_thread
from narrowcast.platform.config.run_fields import StoreAddress
from narrowcast.platform.config.trust import read_json
from narrowcast.platform.errors import RunFailed, StoreRefused, UserError, disk_failure, remedy
from narrowcast.platform.solving import Problem, begin, loaded_problem
from narrowcast.platform.storage.disk import GO_ON, write_atomically, writing
from narrowcast.platform.storage.host import host_clock
from narrowcast.platform.storage.journal import AtWork
from narrowcast.platform.tracking.metrics import format_metric, metric_label, primary_metric
from narrowcast.platform.tracking.units import format_short_seconds
from narrowcast.runs import session
from narrowcast.runs.folder import RESULT, has_run, make_writable
from narrowcast.runs.prepared import PreparedSolve, prepare_solve, resume_solve
from narrowcast.runs.recordable import checked_store
from narrowcast.runs.result import SolveResult
from narrowcast.runs.terminal_output import output_may_end
from narrowcast.solve_run import Solve

logger = logging.getLogger(__name__)
State = Literal["finished", "failed", "skipped", "stopped"]
_OTHER_PROCESS_SECONDS = 60.0
"""Longest wait for the worker of a killed benchmark, which ends soon after it."""


@dataclass(frozen=True)
class InstanceJob:
    """An instance to solve in the folder `output`, and the tags of its run in MLflow.

    `problem_sha256` is that of the instances of the same problem that have finished, empty if none has.
    """

    instance: Instance
    output: Path
    labels: dict[str, str]
    problem_sha256: str = ""


@dataclass(frozen=True)
class InstanceEnd:
    """The end of an instance: finished, with the content of `result.json`; or failed, skipped or stopped, and why.

    An instance is skipped if its solver does not take the problem. It is stopped, and has not ended, if the machine's
    disk or the MLflow store does not take its files.
    """

    name: str
    state: State
    reason: str = ""
    result: dict[str, Any] = field(default_factory=dict)


@dataclass
class WorkerMemory:
    """The last problem of a worker and the solvers that it has warmed up, kept from one instance to the next."""

    source: str = ""
    problem: Problem | None = None
    warm: set[tuple[str, str]] = field(default_factory=set)

    def problem_of(self, solve: Solve) -> Problem:
        """Return the loaded problem of a solve."""
        source = repr(solve.problem_source)
        if self.problem is None or self.source != source:
            self.problem = None  # two of them may not fit into memory
            self.problem, self.source = loaded_problem(solve.problem_source), source
        return self.problem

    def warm_up(self, solve: Solve, problem: Problem) -> None:
        """Try a solver once on this kind of problem, so that its kernels are compiled before a clock runs."""
        key = (repr(solve.solver), solve.problem.kind)
        if key in self.warm:
            return
        self.warm.add(key)
        with suppress(Exception), one_thread():  # the run itself is to show errors
            state = begin(problem, solve.solver, solve.seed)
            solve.solver.step(problem, state.arrays)


def solve_instance(job: InstanceJob, memory: WorkerMemory) -> Generator[InstanceEnd, Any, None]:
    """Solve an instance and yield its end; no error of its problem or solver is raised."""
    name = job.instance.name
    try:
        yield _solved(job, memory)
    except StoreRefused as error:
        yield InstanceEnd(name, "stopped", str(error))
    except Exception as error:
        if (failure := disk_failure(error)) is not None:
            yield InstanceEnd(name, "stopped", f"{job.output / name} cannot be written ({failure}); {remedy(failure)}")
            return
        if isinstance(error, RunFailed | UserError):
            yield InstanceEnd(name, "failed", str(error))
            return
        logger.warning("%s failed", name, exc_info=True)
        first = next(iter(str(error).splitlines()), "")
        yield InstanceEnd(name, "failed", f"{type(error).__name__}: {first}")


def _solved(job: InstanceJob, memory: WorkerMemory) -> InstanceEnd:
    solve, folder = job.instance.solve, job.output / job.instance.name
    problem = memory.problem_of(solve)
    if job.problem_sha256 not in ("", problem.digest):
        raise UserError(
            f"other solves of this benchmark had other data than {problem.source} now gives; put back the files as "
            "they were, or give the benchmark another name (name=...)"
        )
    try:
        solve.solver.check(problem)
    except UserError as error:
        return InstanceEnd(solve.name, "skipped", str(error))
    if (folder / RESULT).is_file():  # the benchmark was killed before it noted that
        return InstanceEnd(solve.name, "finished", result=read_json(folder / RESULT, "remove the folder"))
    memory.warm_up(solve, problem)
    prepared = replace(_prepared(job, problem), labels=job.labels)
    result = session.run(prepared, lambda _: None, keep_checkpoints=False, monitored=False)
    return InstanceEnd(solve.name, "finished", result=result)


def _prepared(job: InstanceJob, problem: Problem) -> PreparedSolve:
    """Prepare the run, or its resume once no other process is at work on it."""
    solve, folder = job.instance.solve, job.output / job.instance.name
    if not has_run(folder):
        return prepare_solve(solve, job.output, problem)
    deadline = host_clock().monotonic() + _OTHER_PROCESS_SECONDS
    while True:
        try:
            return resume_solve(folder, solve, problem)
        except AtWork:
            if host_clock().monotonic() > deadline:
                raise
            time.sleep(1.0)


class BenchmarkDisplay:
    """An `Observer` that prints a line for each instance that ends, and on a terminal the instances that run below."""

    def __init__(self, instances: Sequence[Instance], left: Sequence[Instance], console: Console) -> None:
        self._all, self._ended = len(instances), len(instances) - len(left)
        self._console, self._running = console, list[str]()
        self._status: Status | None = console.status("starting workers") if sys.stdout.isatty() and left else None

    def __enter__(self) -> BenchmarkDisplay:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            with output_may_end():
                self._status.stop()

    def __call__(self, instance: Instance, end: InstanceEnd | None) -> None:
        """Show an instance that begins, with None, or that ends."""
        if end is None:
            self._running.append(instance.name)
        else:
            self._running.remove(instance.name)
            self._ended += 1
            with output_may_end():
                line = f"[{self._ended}/{self._all}] {instance.name}  {_facts(end)}"
                self._console.print(line, highlight=False, soft_wrap=True)
        if self._status:
            self._status.update(f"{self._ended} of {self._all} ended, running: {', '.join(self._running)}")


def _facts(end: InstanceEnd) -> str:
    """Return how an instance ended in a few words."""
    if end.state != "finished":
        return f"{end.state}: {end.reason}"
    result, final = end.result, end.result["final"]
    names = [*(target["metric"] for target in result["targets"]), primary_metric(final), *final]
    shown = [
        f"{metric_label(name)} {format_metric(name, final[name], result['shares'])}" for name in names if name in final
    ]
    seconds = format_short_seconds(result["solver_seconds"])
    return "  ".join([*shown[:1], f"{result['iterations']} iterations (ended by {result['stopped_by']})", seconds])


Observer = Callable[[Instance, InstanceEnd | None], None]
"""Is called with an instance when it begins, with None, and when it ends."""


class InstanceQueue(RetryQueue[InstanceJob, str]):
    """Waiting instances, in the order given; `finished` are those of the benchmark that have a result already."""

    def __init__(
        self,
        name: str,
        left: Sequence[Instance],
        folder: BenchmarkFolder,
        observe: Observer,
        finished: Iterable[Instance] = (),
    ) -> None:
        self._name, self._folder, self._observe = name, folder, observe
        self._by_name = {run.name: run for run in left}
        super().__init__(self._by_name)
        self._problems: dict[str, str] = {}
        for run in finished:
            self._problems.setdefault(_problem_of(run), SolveResult.load(folder.path / run.name).file.problem_sha256)

    def job(self, key: str) -> InstanceJob:
        """Note that an instance begins, and return it."""
        instance = self._by_name[key]
        self._folder.note(instance, "begun")
        self._observe(instance, None)
        labels = {"benchmark": self._name, "benchmark.problem": instance.problem, "benchmark.solver": instance.solver}
        return InstanceJob(instance, self._folder.path, labels, self._problems.get(_problem_of(instance), ""))

    def answer_to(self, message: InstanceEnd) -> None:
        """Note the end of an instance; raise `RunFailed` for one that was stopped, which is left to do."""
        if message.state == "stopped":
            raise RunFailed(f"{message.reason}, then give the same command, which goes on")
        instance = self._by_name[message.name]
        if message.state == "finished":
            self._problems.setdefault(_problem_of(instance), message.result["problem_sha256"])
        self._folder.note(instance, message.state, message.reason)
        self._observe(instance, message)

    def key(self, job: InstanceJob) -> str:
        """Return the name of an instance, which is resumed if its worker dies."""
        return job.instance.name

    def give_up(self, key: str, reason: str) -> None:
        """Note that an instance has failed."""
        self.answer_to(InstanceEnd(key, "failed", reason))


def _problem_of(instance: Instance) -> str:
    return repr(instance.solve.problem_source)


@dataclass(frozen=True)
class PreparedBenchmark:
    """A benchmark that has passed every check; `left` are the instances that have not ended."""

    benchmark: Benchmark
    folder: BenchmarkFolder
    left: Sequence[Instance]
    store: StoreAddress


def prepare_benchmark(benchmark: Benchmark, output: Path, *, retry: bool = False) -> PreparedBenchmark:
    """Check the cluster, the store and the runs that are there; `retry` begins those anew that failed or were skipped.

    Problems are loaded by the workers, so that a solver that does not take one is found then. Raise `UserError`.
    """
    file, folder = benchmark.file, BenchmarkFolder(output / benchmark.file.name)
    if file.backend == "ray":
        _ray_backend(benchmark).check_workers("workers")
    make_writable(output)
    folder.create()
    store = checked_store(benchmark.instances[0].solve, folder.path)
    with folder.locked():
        left = folder.left(benchmark.instances, retry=retry)
        folder.write(benchmark)
    return PreparedBenchmark(benchmark, folder, left, store)


def run_benchmark(prepared: PreparedBenchmark, observe: Observer = lambda _, __: None) -> BenchmarkResult:
    """Solve the instances that are left, write `instances.csv` of all in the file, and return the result.

    An instance that fails, or whose worker dies, does not end the others. Raise `RunFailed` if files cannot be written,
    or if the MLflow store does not take a run.
    """
    folder, file = prepared.folder, prepared.benchmark.file
    with writing(folder.path, GO_ON), folder.locked():
        try:
            if prepared.left:
                whole, left = prepared.benchmark.whole, {run.name for run in prepared.left}
                finished = [run for run in whole if run.name not in left and folder.is_finished(run)]
                queue = InstanceQueue(file.name, prepared.left, folder, observe, finished)
                with _worker_pool(prepared.benchmark) as pool:
                    dispatch(queue, pool, min(file.workers, len(prepared.left)))
        finally:
            rows = result_of(folder, prepared.benchmark.whole).rows
            write_atomically(folder.path / TABLE, as_csv(rows).encode())
    chosen = {instance.name for instance in prepared.benchmark.instances}
    return BenchmarkResult(folder.path, [row for row in rows if row["instance"] in chosen])


def _worker_pool(benchmark: Benchmark) -> AbstractContextManager[WorkerPool]:
    if benchmark.file.backend == "local":
        return nullcontext(LocalPool(solve_instance, WorkerMemory()))
    return _ray_backend(benchmark).worker_pool(solve_instance, WorkerMemory())


def _ray_backend(benchmark: Benchmark) -> RayBackend:
    file = benchmark.file
    return RayBackend(actors=file.workers, cpus_per_actor=file.cpus_per_worker, address=file.address)
