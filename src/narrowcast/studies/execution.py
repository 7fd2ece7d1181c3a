"""Runs without a folder and a store, for studies of hundreds of runs: their results, and the hits of each test user."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from narrowcast.packaged import names_solve
from narrowcast.platform.errors import RunFailed
from narrowcast.platform.models.factorisation import USER_FACTORS, MatrixFactorisation
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.loop import lockstep
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import Run, RunState, start
from narrowcast.platform.solving import begin, iterations
from narrowcast.runs.outputs import answer_sha256
from narrowcast.solve_run import load_solve
from narrowcast.studies.results import COUNTS, METRICS
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
