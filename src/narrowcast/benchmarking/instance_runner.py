"""One instance of a benchmark as a worker solves it: a new or resumed run in the benchmark's folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from narrowcast.benchmarking.benchmark_file import Instance
from narrowcast.platform.errors import RunFailed, StoreRefused, UserError, disk_failure, remedy
from narrowcast.platform.host_time import host_time
from narrowcast.platform.iterations import begin
from narrowcast.platform.json_files import read_json
from narrowcast.platform.solver_contracts import Problem
from narrowcast.platform.threads import one_thread
from narrowcast.platform.tracking.journal import AtWork
from narrowcast.runs import session
from narrowcast.runs.prepare_solve import PreparedSolve, prepare_solve, resume_solve
from narrowcast.runs.run_folder import RESULT, has_run
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
            self.problem, self.source = solve.problem_source.load(), source
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
    deadline = host_time().monotonic() + _OTHER_PROCESS_SECONDS
    while True:
        try:
            return resume_solve(folder, solve, problem)
        except AtWork:
            if host_time().monotonic() > deadline:
                raise
            time.sleep(1.0)
