"""`narrowcast verify` of studies of every kind passes them as they are: pruned, of several objectives, of solves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

import narrowcast as nc
from narrowcast.runs.checks import Budget, Check
from narrowcast.tuning.storage import open_storage
from narrowcast.tuning.trials import DISCARDED
from narrowcast.tuning.verification import verify_study
from sampling import sampled

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
_CREATE_TRIAL = 4
"""The number of an operation in Optuna's journals."""
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


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(STUDIES, {"several"}))
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


@pytest.mark.slow
def test_a_study_that_is_continued_and_killed_has_no_problem(tmp_path: Path) -> None:
    """Its table, result and best values are then older than its last trials, of which one may lack its result."""
    folder = made("solves", tmp_path)
    earlier = {
        path: path.read_bytes() for path in (folder / "trials.csv", folder / "result.json", folder / "best.yaml")
    }
    nc.tune(str(tmp_path / "solves.yaml"), {"study.trials": 8}, output=tmp_path)
    for path, content in earlier.items():
        path.write_bytes(content)
    lines = (folder / "study.journal").read_bytes().splitlines(keepends=True)
    begun = [place for place, line in enumerate(lines) if json.loads(line).get("op_code") == _CREATE_TRIAL]
    (folder / "study.journal").write_bytes(b"".join(lines[: begun[7] + 1]))
    shutil.rmtree(folder / "trials" / "00007")
    (folder / "trials" / "00006" / "result.json").unlink()
    checks = list(verify_study(folder, Budget(0)))
    assert problems(checks) == []
    skipped = {check.subject: check.skipped for check in checks}
    assert skipped["result.json"] == "it is of 5 trials, and the study, which has not ended, has 7 since"
    assert skipped["other trials"] == "trials 6 have no files here"
    (folder / "trials.csv").write_bytes(earlier[folder / "trials.csv"].replace(b"complete", b"failed", 1))
    assert problems(list(verify_study(folder, Budget(0)))) == ['trials.csv: trial 0: state is "failed", not "complete"']


@pytest.mark.slow
def test_a_study_with_its_storage_elsewhere_that_lost_trials_has_no_problem(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'studies.db'}"
    (file := tmp_path / "solves.yaml").write_text(STUDIES["solves"])
    nc.tune(str(file), {"study.storage": storage, "study.trials": 2}, output=tmp_path)
    study = optuna.load_study(study_name="solves", storage=open_storage(storage, 1.0))
    lost = study.ask()
    lost.set_user_attr(DISCARDED, "its worker died; tried again")
    study.tell(lost, state=TrialState.FAIL)
    folder = nc.tune(str(file), {"study.storage": storage, "study.trials": 4}, output=tmp_path).folder
    assert json.loads((folder / "result.json").read_text())["trials"] == {"complete": 4, "lost": 1}
    checks = list(verify_study(folder, Budget()))
    assert problems(checks) == []
    shutil.rmtree(folder / "trials" / "00001")  # as of a machine that has files of its own
    checks = list(verify_study(folder, Budget(0)))
    assert problems(checks) == []
    assert any("the choice would need the files of trials 1" in check.compared for check in checks)
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {"trials": {"complete": 5}}))
    assert any("result.json: trials is" in problem for problem in problems(list(verify_study(folder, Budget(0)))))


def rewritten(study: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = study / "trials" / "00001" / "rounds.jsonl"
    rows = [change(json.loads(line)) for line in path.read_text().splitlines()]
    assert len(rows) > 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_damaged_files_of_trials_are_named(tmp_path: Path) -> None:
    folder = made("solves", tmp_path)
    for damage, problem in (
        (lambda study: (study / "trials" / "00001" / "result.json").write_text("{"), "its result.json is unreadable"),
        (lambda study: (study / "trials" / "00001" / "rounds.jsonl").unlink(), "its metrics are not those of its last"),
        (lambda study: (study / "trials" / "00001" / "rounds.jsonl").write_text("3\n"), "its metrics are not those of"),
        (lambda study: rewritten(study, lambda row: {**row, "round": None}), "its metrics are not those of its last"),
        (lambda study: rewritten(study, lambda row: {**row, "wall_seconds": "1"}), ""),
        (lambda study: rewritten(study, lambda row: {**row, "round": -row["round"]}), "round is less than before"),
        (lambda study: (study / "result.json").write_text("[]"), "result.json: unreadable"),
        (lambda study: (study / "best.yaml").unlink(), "best.yaml: missing"),
        (lambda study: (study / "trials.csv").unlink(), "trials.csv: missing"),
        (lambda study: (study / "study.journal").write_text('{"op_code": 99}\n{}\n'), "study.journal: "),
    ):
        copy = Path(shutil.copytree(folder, tmp_path / "damaged" / folder.name, dirs_exist_ok=True))
        damage(copy)
        found = problems(list(verify_study(copy, Budget(0))))
        assert any(problem in each for each in found) or not problem, (problem, found)
        shutil.rmtree(copy)
