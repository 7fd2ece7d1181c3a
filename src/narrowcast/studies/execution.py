"""Hundreds of runs within a time limit, without folders and a store: their results, and the hits of each test user.

There is one process each; killed at any moment, the queue loses the running ones only. Finished runs are appended to
OUTPUT/STUDY.csv, and runs that CSV files have are not repeated, so that the same call goes on. MLflow, Ray and Optuna
are not imported.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.packaged import names_solve
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.models.factorisation import USER_FACTORS, MatrixFactorisation
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.loop import lockstep
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import Run, RunState, start
from narrowcast.platform.solving import begin, iterations
from narrowcast.runs.outputs import answer_sha256
from narrowcast.solve_run import load_solve
from narrowcast.studies.results import COUNTS, METRICS, Rows, append
from narrowcast.studies.spec import BASELINES, RunSpec


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
    each = [LightRun(spec, seed, test=test) for spec, seed, test in runs]
    rounds = lockstep([light.run for light in each])
    outcomes = next(rounds)
    try:
        while True:
            outcomes = rounds.send([place for place, outcome in outcomes.items() if each[place].saw(outcome)])
    except StopIteration:
        seconds = round((time.perf_counter() - began) / len(each), 2)
    return [light.result | {"wall_seconds": seconds} for light in each]


def _shown(metrics: Mapping[str, float], *, test: bool) -> dict[str, float]:
    """Return the metrics of a result, without those of test data unless `test`."""
    return {name: value for name, value in metrics.items() if test or not name.startswith("test")}


def _parameters(run: Run, state: RunState) -> tuple[Any, Any]:
    """Return the item factors and all user factors; those of clients that never took part are as at the start."""
    users = run.algorithm.init_clients(run.task)[USER_FACTORS]
    users[state.participants] = state.clients[USER_FACTORS]
    return run.algorithm.final(state.server), {USER_FACTORS: users}


def baselines_of(spec: RunSpec, seed: int) -> Mapping[str, Mapping[str, float]]:
    """Return the metrics of each baseline of a specification's problem or data, by the baseline's name."""
    if names_solve(spec.experiment):
        problem: Any = load_solve(spec.experiment, [*spec.overrides, f"seed={seed}"]).problem_source.load()
        of_problem: Mapping[str, Mapping[str, float]] = problem.baselines()
        return of_problem
    experiment = spec.configured(seed, spec.label)
    model: Any = experiment.model
    of_data: Mapping[str, Mapping[str, float]] = model.baselines(experiment.data_source.load())
    return of_data


def light_baseline(spec: RunSpec, seed: int, *, test: bool = True) -> dict[str, Any]:
    """Return the metrics of a baseline of a specification's problem or data as a result, for which nothing is sent."""
    began = time.perf_counter()
    found = baselines_of(spec, seed)[BASELINES[spec.measure]]
    return {
        "rounds": 0,
        "final": _shown(found, test=test),
        "uplink_bits": 0,
        "downlink_bits": 0,
        "wall_seconds": round(time.perf_counter() - began, 2),
    }


def light_solve(spec: RunSpec, seed: int, *, test: bool = True) -> dict[str, Any]:
    """Solve a specification and return its result, whose rounds are iterations; without `test` no test metrics."""
    began = time.perf_counter()
    solve = load_solve(spec.experiment, [*spec.overrides, f"seed={seed}"])
    problem = solve.problem_source.load()
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
