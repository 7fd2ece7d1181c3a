"""An answer that is measured again has the same bound, to the bit: restarts of Lanczos are seeded."""

from __future__ import annotations

from typing import Any

import pytest

from narrowcast.platform.solving import begin, iterations, measured
from narrowcast.solve_run import load_solve


@pytest.mark.slow
def test_a_program_is_measured_the_same_again() -> None:
    values = {
        "problem": {"kind": "sensor_localisation", "sensors": 12, "anchors": 4, "radio_range": 0.6},
        "solver": {"kind": "burer_monteiro", "rank": 6},
        "iterations": 20,
        "name": "again",
    }
    solve: Any = load_solve(values)
    problem = solve.problem_source.load()
    *_, last = iterations(problem, solve.solver, solve, begin(problem, solve.solver, 0))
    assert last.state is not None
    for _ in range(4):
        assert dict(measured(problem, solve.solver, last.state)) == dict(last.metrics)
