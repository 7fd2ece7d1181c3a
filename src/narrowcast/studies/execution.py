"""Hundreds of runs within a time limit, without folders and a store: their results, and the hits of each test user.

They run in processes or on Ray; killed at any moment, the queue loses the running ones only. Finished runs are
appended to OUTPUT/STUDY.csv, and runs that CSV files have are not repeated, so that the same call goes on. MLflow and
Optuna are not imported, and Ray only where runs are to go there.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowcast.cluster.worker_pool import Done, JobQueue, WorkerPool, dispatch
from narrowcast.packaged import names_solve
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.models.factorisation import MatrixFactorisation
from narrowcast.platform.models.model import USER_FACTORS
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.loop import lockstep
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import Run, RunState, start
from narrowcast.platform.solving import begin, iterations, loaded_problem
from narrowcast.platform.storage.host import block_signals
from narrowcast.platform.tracking.metrics import SUCCESS
from narrowcast.runs.outputs import answer_sha256
from narrowcast.solve_run import load_solve
from narrowcast.studies.results import COUNTS, METRICS, Rows, append
from narrowcast.studies.spec import BASELINES, RunSpec

if TYPE_CHECKING:
    from narrowcast.cluster.backend import RayBackend


class LightRun:
    """A run in this process; `result` is what `result.json` would have, with an array `hits`.

    Without `test` the result has no test metrics. The result of a run that failed has its `error` and no metrics, and
    that of a run that ended at its target has the rounds until then. If the specification asks for it, `curve` has the
    results until each evaluation, with the number of the model's values at checkpoints.
    """

    def __init__(self, spec: RunSpec, seed: int, rounds: int | None = None, *, test: bool = True) -> None:
        self.experiment = spec.configured(seed, spec.label, rounds)
        self._task = self.experiment.task(self.experiment.data_source.load())
        self.run = Run(self.experiment, self.experiment.secured_algorithm, self._task)
        self._target, self._test = spec.target, test
        self.result: dict[str, Any] = {"rounds": self.experiment.rounds, "final": {}}
        if spec.curve:
            self.result["curve"] = []

    def saw(self, outcome: Outcome | RunFailed) -> bool:
        """Take in the outcome of a round; return whether the run is at its target."""
        if isinstance(outcome, RunFailed):
            self.result |= {"error": str(outcome).partition("\n")[0], "final": {}}
            return True
        record, result = outcome.record, self.result
        result |= {"uplink_bits": record.total_uplink_bits, "downlink_bits": record.total_downlink_bits}
        result["simulated_seconds"] = round(record.simulated_seconds, 3)
        if outcome.metrics:
            result["final"] = _shown(outcome.metrics, test=self._test)
            if "curve" in result:
                result["curve"].append(self._point(outcome))
        if self._target is not None and outcome.metrics.get(self._target[0], -1.0) >= self._target[1]:
            result["rounds"] = record.round
            return True
        if outcome.state is not None and record.round == self.experiment.rounds:
            result["model_sha256"] = model_sha256(self.run.algorithm, outcome.state)
            model = self._task.model
            if self._test and isinstance(model, MatrixFactorisation):
                result["hits"] = model.ranks(*_parameters(self.run, outcome.state), self._task.data, "test") < 10
        return False

    def _point(self, outcome: Outcome) -> dict[str, Any]:
        """Return the result of a run that had ended with this round."""
        measured = {name: value for name, value in self.result["final"].items() if name in METRICS}
        counted = {name: self.result[name] for name in (*COUNTS, "simulated_seconds")}
        point = {**counted, "rounds": outcome.record.round, "final": measured}
        if outcome.state is not None:
            model = self.run.algorithm.final(outcome.state.server)
            point["model_values"] = sum(values.size for values in model.values())
        return point


def light_run(spec: RunSpec, seed: int, rounds: int | None = None, *, test: bool = True) -> dict[str, Any]:
    """Run a specification by itself and return its result."""
    if spec.measure in BASELINES:
        return light_baseline(spec, seed, test=test)
    if names_solve(spec.experiment):
        return light_solve(spec, seed, test=test)
    if (measurement := spec.measurement) is not None:
        measured: dict[str, Any] = measurement(spec, seed, test=test)
        return measured
    light, began = LightRun(spec, seed, rounds, test=test), time.perf_counter()
    try:
        for outcome in light.experiment.backend.run(light.run, start(light.run)):
            if light.saw(outcome):
                break
    except RunFailed as error:
        light.saw(error)
    return light.result | {"wall_seconds": round(time.perf_counter() - began, 2)}


def light_runs(runs: Sequence[tuple[RunSpec, int, bool]]) -> list[dict[str, Any]]:
    """Run specifications with their seed and `test` in lockstep; return their results, with equal shares of the time.

    Local training of equal shapes is one tensor program; the results are those of each run by itself.
    """
    if len(runs) == 1:
        ((spec, seed, test),) = runs
        return [light_run(spec, seed, test=test)]
    began = time.perf_counter()
    replicas = [LightRun(spec, seed, test=test) for spec, seed, test in runs]
    rounds = lockstep([light.run for light in replicas])
    outcomes = next(rounds)
    try:
        while True:
            outcomes = rounds.send([index for index, outcome in outcomes.items() if replicas[index].saw(outcome)])
    except StopIteration:
        seconds = round((time.perf_counter() - began) / len(replicas), 2)
    return [light.result | {"wall_seconds": seconds} for light in replicas]


def _shown(metrics: Mapping[str, float], *, test: bool) -> dict[str, float]:
    """Return the metrics of a result, without those of test data, as an attack's success is, unless `test`."""
    return {name: value for name, value in metrics.items() if test or not name.startswith(("test", SUCCESS))}


def _parameters(run: Run, state: RunState) -> tuple[Any, Any]:
    """Return the item factors and all user factors; those of clients that never took part are as at the start."""
    users = run.algorithm.init_clients(run.task)[USER_FACTORS]
    users[state.participants] = state.clients[USER_FACTORS]
    return run.algorithm.final(state.server), {USER_FACTORS: users}


def baselines_of(spec: RunSpec, seed: int) -> Mapping[str, Mapping[str, float]]:
    """Return the metrics of each baseline of a specification's problem or data, by the baseline's name."""
    if names_solve(spec.experiment):
        solve = load_solve(spec.experiment, [*spec.overrides, f"seed={seed}"])
        return loaded_problem(solve.problem_source).baselines()
    experiment = spec.configured(seed, spec.label)
    return experiment.model.baselines(experiment.data_source.load())


def light_baseline(spec: RunSpec, seed: int, *, test: bool = True) -> dict[str, Any]:
    """Return the metrics of a baseline of a specification's problem or data as a result, for which nothing is sent."""
    began = time.perf_counter()
    metrics = baselines_of(spec, seed)[BASELINES[spec.measure]]
    return {
        "rounds": 0,
        "final": _shown(metrics, test=test),
        "uplink_bits": 0,
        "downlink_bits": 0,
        "wall_seconds": round(time.perf_counter() - began, 2),
    }


def light_solve(spec: RunSpec, seed: int, *, test: bool = True) -> dict[str, Any]:
    """Solve a specification and return its result, whose rounds are iterations; without `test` no test metrics."""
    began = time.perf_counter()
    solve = load_solve(spec.experiment, [*spec.overrides, f"seed={seed}"])
    problem = loaded_problem(solve.problem_source)
    solve.solver.check(problem)
    *_, last = iterations(problem, solve.solver, solve, begin(problem, solve.solver, seed))
    assert last.state is not None
    return {
        "rounds": last.step,
        "final": _shown(last.metrics, test=test),
        "model_sha256": answer_sha256(solve.solver.answer(last.state.arrays)),
        "wall_seconds": round(time.perf_counter() - began, 2),
    }


def one_core_each() -> None:
    """Give the numerical libraries of processes that start from now on one thread, unless the environment says more.

    They read these variables when a process starts.
    """
    for library in ("OMP", "OPENBLAS", "MKL", "NUMBA"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")


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
        together_with = [run for run in self.missing() if run.spec.together == together]
        return list({(run.spec.label, run.seed): run for run in together_with}.values())

    def seconds(self, planned: Planned) -> float:
        """Return how long a run takes: as the longest of its method so far, or a guess."""
        stem = planned.spec.label.rpartition("-")[0]
        return max((row["wall_seconds"] for row in self.rows.of_stem(stem)), default=_GUESS_SECONDS)

    def ended(self, planned: Planned, result: dict[str, Any]) -> None:
        """Count a run as finished."""
        packed = {name: value for name, value in result.items() if name != "hits"}
        self.rows[planned.spec, planned.seed] = packed


Job = list["Planned"]
"""Runs that go in lockstep, or a single one."""
Ended = tuple[Job, list[dict[str, Any]] | UserError]
"""A job with the results of its runs, or why it cannot run."""


class _TimeUpError(Exception):
    """The time limit has passed; jobs that still run are lost."""


class StudyJobs(JobQueue[Job]):
    """The jobs of a queue that the time and the memory allow; results go to the rows and to the files of `output`."""

    def __init__(self, queue: Queue, output: Path, seconds: float, memory_gib: float) -> None:
        self.queue, self.output, self.memory_gib = queue, output, memory_gib
        self.end, self.n_ended = time.monotonic() + seconds, 0
        self.refused: list[str] = []
        self._running: list[Job] = []

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()

    def heartbeat(self) -> None:
        """Raise if the time is up, which ends the jobs that run."""
        if self.left <= 0:
            raise _TimeUpError

    def next_job(self) -> Job | None:
        """Return the first missing job that is likely to end in time and fits into the memory beside the others."""
        used = sum(planned.spec.memory_gib for job in self._running for planned in job)
        for planned in self.queue.missing():
            job = self.queue.next_job(planned)
            needed = sum(run.spec.memory_gib for run in job)
            if sum(map(self.queue.seconds, job)) <= self.left and used + needed <= self.memory_gib:
                self.queue.begun |= {(run.spec.label, run.seed) for run in job}
                self._running.append(job)
                return job
        return None

    def answer_to(self, message: Ended) -> None:
        """Append the results of a job to the files and print a line of each."""
        job, results = message
        self._running.remove(job)
        if isinstance(results, UserError):
            self.refused.append(f"{job[0].spec.label}-seed-{job[0].seed} cannot run: {results}")
            print(self.refused[-1], flush=True)
            return
        for planned, result in zip(job, results, strict=True):
            if not planned.per_user:
                result.pop("hits", None)
            append(self.output / f"{planned.study}.csv", planned.spec, planned.seed, result)
            self.queue.ended(planned, result)
            self.n_ended += 1
            left = "" if math.isinf(self.left) else f", {self.left:.0f} s left"
            print(f"[{self.n_ended}{left}] {_line(planned, result)}", flush=True)

    def worker_died(self, job: Job, reason: str) -> None:
        """Raise `RunFailed`: another try would take as much memory."""
        name = f"{job[0].spec.label}-seed-{job[0].seed}"
        raise RunFailed(f"{name}: {reason}, perhaps for lack of memory; try fewer --jobs")


def run_job(job: Job, shared: None) -> Generator[Ended, None, None]:
    """Run a job in a worker and yield its results."""
    del shared
    try:
        yield job, light_runs([(planned.spec, planned.seed, planned.test) for planned in job])
    except UserError as error:
        yield job, error


def _in_process(job: Job) -> Ended:
    return next(run_job(job, None))


class ProcessPool:
    """Workers that are processes of this machine, which end with this one."""

    def __init__(self, workers: int) -> None:
        self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
        self._running = dict[Future[Ended], int]()
        self._answered: list[int] = []

    def start(self, worker: int, job: Any) -> None:
        """Start a job on a free worker."""
        with block_signals(signal.SIGINT):  # which is for this process to handle
            future = self._pool.submit(_in_process, job)
        self._running[future] = worker

    def answer(self, worker: int, message: Any) -> None:
        """Count the job as done, which has a single message."""
        del message
        self._answered.append(worker)

    def next_message(self, timeout_seconds: float) -> tuple[int, Any] | None:
        """Return a worker and its results or `Done`; None if there is nothing within the timeout."""
        if self._answered:
            return self._answered.pop(), Done()
        for future in wait(self._running, timeout_seconds, FIRST_COMPLETED).done:
            try:
                return self._running.pop(future), future.result()
            except BrokenProcessPool:
                raise RunFailed("a run's process was killed, perhaps for lack of memory; try fewer --jobs") from None
        return None

    def close(self) -> None:
        """End all processes at once."""
        for process in multiprocessing.active_children():
            process.kill()
        self._pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _processes(workers: int) -> Iterator[WorkerPool]:
    one_core_each()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # its workers are to end with it
    pool = ProcessPool(workers)
    try:
        yield pool
    finally:
        pool.close()
        signal.signal(signal.SIGTERM, before)


def work(
    queue: Queue,
    output: Path,
    workers: int,
    *,
    seconds: float = float("inf"),
    memory_gib: float = 100.0,
    ray: RayBackend | None = None,
) -> None:
    """Run what is missing until all is done or the time is up; a line for each run that ends.

    With `ray` its actors are the workers, of which it has `workers` too. Raise `RunFailed` at the end for refused runs.
    """
    output.mkdir(parents=True, exist_ok=True)
    jobs = StudyJobs(queue, output, seconds, memory_gib)
    try:
        with _processes(workers) if ray is None else ray.worker_pool(run_job, None) as pool:
            dispatch(jobs, pool, workers)
    except _TimeUpError:
        pass
    left = sum(1 for _ in queue.missing())
    print(f"{jobs.n_ended} runs ended, {left} of those that can be planned now are left")
    if jobs.refused:
        raise RunFailed(f"{len(jobs.refused)} runs were refused; the first: {jobs.refused[0]}")


def _line(planned: Planned, result: dict[str, Any]) -> str:
    kept = [f"{name} {100 * result['final'][name]:.2f}" for name in METRICS if name in result["final"]]
    outcome = result.get("error") or ", ".join(kept)
    bits = result.get("uplink_bits")
    return f"{planned.spec.label}-seed-{planned.seed}: {outcome}; {bits} bits, {result['wall_seconds']:.0f} s"
