"""A run without a folder and a store, for studies of hundreds of runs: its result, and the hits of each test user."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from narrowcast.platform.errors import RunFailed
from narrowcast.platform.evaluation import model_sha256
from narrowcast.platform.models.matrix_factorisation import USER_FACTORS, MatrixFactorisation
from narrowcast.platform.run import Run
from narrowcast.platform.state import RunState, start
from narrowcast.reproduce.run_spec import RunSpec


def light_run(spec: RunSpec, seed: int, rounds: int | None = None, *, test: bool = True) -> dict[str, Any]:
    """Run a specification in this process and return what `result.json` would have, with an array `hits`.

    Without `test` the result has no test metrics. A run that fails returns its `error` and no metrics.
    """
    experiment = spec.configured(seed, spec.label, rounds)
    task = experiment.task(experiment.data_source.load())
    run = Run(experiment, experiment.secured_algorithm, task)
    began, outcome = time.perf_counter(), None
    result: dict[str, Any] = {"rounds": experiment.rounds, "final": {}}
    metrics: Mapping[str, float] = {}
    try:
        for outcome in experiment.backend.run(run, start(run)):
            metrics = outcome.metrics or metrics
    except RunFailed as error:
        result["error"] = str(error).partition("\n")[0]
    if outcome is not None:
        record = outcome.record
        result |= {"uplink_bits": record.total_uplink_bits, "downlink_bits": record.total_downlink_bits}
        result["simulated_seconds"] = round(record.simulated_seconds, 3)
        if outcome.state is not None and "error" not in result:
            result["final"] = {name: value for name, value in metrics.items() if test or not name.startswith("test")}
            result["model_sha256"] = model_sha256(run.algorithm, outcome.state)
            if test and isinstance(task.model, MatrixFactorisation):
                result["hits"] = task.model.ranks(*_parameters(run, outcome.state), task.data, "test") < 10
    return result | {"wall_seconds": round(time.perf_counter() - began, 2)}


def _parameters(run: Run, state: RunState) -> tuple[Any, Any]:
    """Return the item factors and all user factors; those of clients that never took part are as at the start."""
    users = run.algorithm.init_clients(run.task)[USER_FACTORS]
    users[state.participants] = state.clients[USER_FACTORS]
    return run.algorithm.final(state.server), {USER_FACTORS: users}
