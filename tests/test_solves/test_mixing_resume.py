"""Solves of MAXCUT go on from a checkpoint, and after a kill, as if they had not ended."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

import narrowcast as nc
from command import Command
from narrowcast.platform.solving import SolveState, begin
from narrowcast.runs.outputs import answer_sha256
from narrowcast.solves.max_cut import RandomMaxCut
from narrowcast.solves.mixing import Mixing

# MLflow's SQL store uses what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
SOLVERS: tuple[dict[str, Any], ...] = (
    *({"selection": each, "momentum": 0.3} for each in ("cyclic", "uniform", "importance", "greedy")),
    {"momentum": "adaptive"},
)


@pytest.mark.parametrize("fields", SOLVERS, ids=lambda fields: "-".join(map(str, fields.values())))
def test_a_checkpoint_in_the_middle_changes_nothing(fields: dict[str, Any]) -> None:
    solver, source = Mixing(**fields), RandomMaxCut(vertices=50, edges=150, seed=1, roundings=0)

    def after(state: SolveState, sweeps: int) -> SolveState:
        problem, arrays = source.load(), state.arrays
        for _ in range(sweeps):
            arrays, _ = solver.step(problem, arrays)
        return SolveState(state.iteration + sweeps, arrays, 0.0)

    whole = after(begin(source.load(), solver, 4), 60)
    half = SolveState.unpacked(*after(begin(source.load(), solver, 4), 31).packed())
    resumed = after(half, 29)
    assert answer_sha256(solver.answer(resumed.arrays)) == answer_sha256(solver.answer(whole.arrays))
    assert resumed.packed()[0].keys() == whole.packed()[0].keys()
    assert float(resumed.arrays["momentum"]) == float(whole.arrays["momentum"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("solver", "iterations", "killed_after"),
    [
        ({"kind": "mixing", "selection": "importance", "momentum": 0.3}, 200, 25),
        ({"kind": "burer_monteiro", "rank": 8, "perturbation": "noise"}, 24, 5),
    ],
    ids=("mixing", "burer_monteiro"),
)
def test_a_killed_solve_resumes_to_the_same_answer(
    solver: dict[str, Any], iterations: int, killed_after: int, tmp_path: Path
) -> None:
    problem = {"kind": "random_max_cut", "proof": "factorisation", "roundings": 0}
    settings = {"problem": problem, "solver": solver, "iterations": iterations, "tolerance": 0}
    settings |= {"evaluate_every": iterations}
    whole = nc.solve("max-cut-g1", settings, output=tmp_path / "whole", progress=False)
    words = [f"{path}={json.dumps(value)}" for path, value in settings.items()]
    command = Command("run", "max-cut-g1", *words, "checkpoint_every=2", "--output", tmp_path, log=tmp_path / "killed")
    try:
        command.wait_for_round(tmp_path / "max-cut-g1", killed_after)
        command.send(signal.SIGKILL)
        assert command.wait() == -signal.SIGKILL
    finally:
        command.clean_up()
    again = Command("run", "--resume", "max-cut-g1", "--output", tmp_path, log=tmp_path / "again")
    try:
        assert again.wait() == 0, again.err
    finally:
        again.clean_up()
    result = json.loads((tmp_path / "max-cut-g1" / "result.json").read_text())
    assert result["answer_sha256"] == whole.file.answer_sha256
