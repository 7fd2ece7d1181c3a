"""`narrowcast verify` of studies of every kind passes them as they are: pruned, of several objectives, of solves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import narrowcast as nc
from narrowcast.runs.checks import Check
from narrowcast.runs.repetition import Budget
from narrowcast.tuning.study_verification import verify_study

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
EXPERIMENT = """
experiment:
  base: fedavg-digits
  rounds: 6
  evaluate_every: 1
  data: {clients: 10}
  clients_per_round: 3
  model: {hidden: [4]}
  tracking: {system_metrics: false}
"""
SOLVE = """
solve:
  problem: {kind: synthetic_completion, rows: 40, columns: 30, rank: 2, fraction: 0.6}
  solver: {kind: asd, rank: 2}
  iterations: 40
  evaluate_every: 5
"""
RATES = "space: {training.learning_rate: {kind: float, low: 0.001, high: 1, log: true}}\n"
RANKS = "space: {solver.rank: [1, 2, 3], solver.kind: [asd, scaled_asd]}\n"
STUDIES = {
    "pruned": f"{EXPERIMENT}{RATES}study: {{objectives: {{validation.accuracy: maximize}}, trials: 8, backend: local, "
    "pruner: {kind: median, startup_trials: 2}, seeds: 2, holdout: {trials: 0}}\n",
    "several": f"{EXPERIMENT}{RATES}study: {{objectives: {{validation.accuracy: maximize, uplink_bits: minimize}}, "
    "trials: 4, backend: local, budget: {uplink_bits: 150000}, holdout: {trials: 2, seeds: 1}}\n",
    "solves": f"{SOLVE}{RANKS}study: {{objectives: {{test.relative_error: minimize, solver_seconds: minimize}}, "
    "trials: 5, backend: local, budget: {solver_seconds: 100}, seeds: 2, holdout: {trials: 1, seeds: 1}}\n",
}


def made(name: str, output: Path) -> Path:
    (file := output / f"{name}.yaml").write_text(STUDIES[name])
    return nc.tune(str(file), output=output).folder


def problems(checks: list[Check]) -> list[str]:
    return [f"{check.subject}: {check.problem}" for check in checks if check.problem]


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_as_it_was_written_has_no_problem(name: str, tmp_path: Path) -> None:
    folder = made(name, tmp_path)
    for budget in (Budget(0), Budget(7, seed=1), Budget(7, seed=2), Budget()):
        checks = list(verify_study(folder, budget))
        assert problems(checks) == []
    repeated = next(check for check in checks if check.subject == "trials repeated")
    assert repeated.compared.endswith("(100 %)")
    if name == "pruned":
        results = [json.loads(path.read_text()) for path in folder.glob("trials/*/result.json")]
        assert {each["state"] for each in results} == {"complete", "pruned"}


def test_damaged_files_of_trials_are_named(tmp_path: Path) -> None:
    folder = made("solves", tmp_path)
    for damage, problem in (
        (lambda study: (study / "trials" / "00001" / "result.json").write_text("{"), "its result.json is unreadable"),
        (lambda study: (study / "trials" / "00001" / "rounds.jsonl").unlink(), "its metrics are not those of its last"),
        (lambda study: (study / "result.json").write_text("[]"), "result.json: unreadable"),
        (lambda study: (study / "best.yaml").unlink(), "best.yaml: missing"),
        (lambda study: (study / "trials.csv").unlink(), "trials.csv: missing"),
        (lambda study: (study / "study.journal").write_text('{"op_code": 99}\n{}\n'), "study.journal: "),
    ):
        copy = Path(shutil.copytree(folder, tmp_path / "damaged" / folder.name, dirs_exist_ok=True))
        damage(copy)
        found = problems(list(verify_study(copy, Budget(0))))
        assert any(problem in each for each in found), (problem, found)
        shutil.rmtree(copy)
