"""A solve without a folder and a store, with the result that `light_run` has for an experiment."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from narrowcast.packaged import names_solve
from narrowcast.platform.iterations import begin, iterations
from narrowcast.platform.models.rating_baselines import BIASES, USER_MEAN
from narrowcast.reproduce.run_spec import RunSpec
from narrowcast.runs.solve_outputs import answer_sha256
from narrowcast.solve_run import load_solve

BASELINES: Mapping[str, str] = {"user_mean": USER_MEAN, "biases": BIASES, "popularity": "popularity"}
"""The names of baselines by `RunSpec.measure`."""


def light_baseline(spec: RunSpec, seed: int, *, test: bool = True) -> dict[str, Any]:
    """Return the metrics of a baseline of a specification's problem or data as a result, for which nothing is sent."""
    began = time.perf_counter()
    if names_solve(spec.experiment):
        problem: Any = load_solve(spec.experiment, [*spec.overrides, f"seed={seed}"]).problem_source.load()
        every = problem.baselines()
    else:
        experiment = spec.configured(seed, spec.label)
        model: Any = experiment.model
        every = model.baselines(experiment.data_source.load())
    found = every[BASELINES[spec.measure]]
    return {
        "rounds": 0,
        "final": {name: each for name, each in found.items() if test or not name.startswith("test")},
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
        "final": {name: each for name, each in last.metrics.items() if test or not name.startswith("test")},
        "model_sha256": answer_sha256(solve.solver.answer(last.state.arrays)),
        "wall_seconds": round(time.perf_counter() - began, 2),
    }
