"""Files that have changed since a run, a solve, a study or a benchmark began: each is refused, in one line."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

import narrowcast as nc
from command_line import assert_refused, narrowcast
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.state import RunState
from narrowcast.platform.storage.checkpoint import load_checkpoint, save_checkpoint
from narrowcast.runs.verification import verify
from narrowcast.tuning.study import prepare_study, run_study
from narrowcast.tuning.study_file import load_study
from studies import trials

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")  # MLflow's store
RUN = """
data: {kind: ratings, path: shop.csv, test_negatives: 3}
model: {kind: matrix_factorisation, embedding_dim: 4}
algorithm: fedmf
backend: local
rounds: 2
name: shop
tracking: {system_metrics: false}
"""
SOLVE = """
problem: {kind: entry_completion, path: entries.csv}
solver: {kind: scaled_asd, rank: 1}
iterations: 3
name: entries
tracking: {system_metrics: false}
"""
STUDY = """
name: study
experiment:
  data: {kind: ratings, path: shop.csv, test_negatives: 3}
  model: matrix_factorisation
  algorithm: fedmf
  rounds: 1
study: {objectives: {validation.hr@10: maximize}, sampler: random, trials: 1, backend: local, holdout: {trials: 0}}
space: {training.learning_rate: [0.1, 0.2]}
"""
BENCHMARK = """
problems: {entries: {kind: entry_completion, path: entries.csv}}
solvers: {scaled_asd: {kind: scaled_asd, rank: 1}, als: {kind: als, rank: 1}}
solve: {iterations: 3}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all files, in which the process works."""
    rows = [f"{user},{(2 * user + 3 * item) % 17},{item}" for user in range(8) for item in range(5)]
    (tmp_path / "shop.csv").write_text("\n".join(["user,item,timestamp", *rows, ""]))
    entries = [f"{row},{column},{(row + 1) * (column + 2)}" for row in range(12) for column in range(12)]
    (tmp_path / "entries.csv").write_text("\n".join(["row,column,value", *entries, ""]))
    for name, text in {"run": RUN, "solve": SOLVE, "study": STUDY, "benchmark": BENCHMARK}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_a_run_goes_on_with_its_own_data_only(folder: Path) -> None:
    assert narrowcast("run", "run.yaml").status == 0
    written = (folder / "shop.csv").read_text()
    change(folder / "shop.csv", "\n3,15,3\n", "\n3,16,3\n")
    said = narrowcast("run", "--resume", "shop", "rounds=4")
    assert_refused(said, "shop began with other data than shop.csv now gives")
    (folder / "shop.csv").write_text("\n".join(written.splitlines()[:21]))
    assert_refused(narrowcast("run", "--resume", "shop", "rounds=4"), "began with other data")
    (folder / "shop.csv").write_text(written)
    assert narrowcast("run", "--resume", "shop", "rounds=4").status == 0


def test_a_run_without_a_sha256_of_its_data_goes_on_unless_clients_are_gone(folder: Path) -> None:
    assert narrowcast("run", "run.yaml").status == 0
    place = folder / "runs" / "shop" / "checkpoint"
    kept = load_checkpoint(place, RunState)
    for file in place.iterdir():
        file.unlink()
    save_checkpoint(place, kept.state, kept.digest)  # as version 0.2 wrote it
    assert load_checkpoint(place, RunState).data_sha256 == ""
    written = (folder / "shop.csv").read_text()
    (folder / "shop.csv").write_text("\n".join(written.splitlines()[:21]))
    assert_refused(narrowcast("run", "--resume", "shop", "rounds=4"), "shop has trained client 7, but shop.csv has")
    (folder / "shop.csv").write_text(written)
    assert narrowcast("run", "--resume", "shop", "rounds=4").status == 0
    assert load_checkpoint(place, RunState).data_sha256


@pytest.mark.slow
def test_verify_and_compare_say_that_data_differ(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert narrowcast("run", "run.yaml").status == 0
    result = json.loads((folder / "runs" / "shop" / "result.json").read_text())
    assert result["data_sha256"] == nc.data.Ratings(path="shop.csv", test_negatives=3).load().digest
    change(folder / "shop.csv", "\n3,15,3\n", "\n3,16,3\n")
    checks = {each.subject: each for each in verify(folder / "runs" / "shop")}
    assert "different data" in checks["data"].problem and result["data_sha256"] in checks["data"].problem
    assert checks["rounds and outputs"].skipped
    assert narrowcast("run", "run.yaml", "name=again").status == 0
    assert all(not each.problem for each in verify(folder / "runs" / "again"))
    with caplog.at_level(logging.WARNING):
        nc.compare(["shop", "again"])
    assert "shop and again ran on different data" in caplog.text
    caplog.clear()
    assert narrowcast("run", "run.yaml", "name=third", "algorithm.server_learning_rate=0.5").status == 0
    nc.compare(["again", "third"])
    assert "different data" not in caplog.text


def test_a_solve_goes_on_with_its_own_problem_only(folder: Path) -> None:
    assert narrowcast("run", "solve.yaml").status == 0
    change(folder / "entries.csv", "\n2,2,12\n", "\n2,2,13\n")
    assert_refused(narrowcast("run", "--resume", "entries", "iterations=5"), "entries began with other data")
    checks = {each.subject: each for each in verify(folder / "runs" / "entries")}
    assert "different data" in checks["problem"].problem


def test_a_study_goes_on_with_its_own_data_only(folder: Path) -> None:
    assert narrowcast("tune", "study.yaml").status == 0
    change(folder / "shop.csv", "\n3,15,3\n", "\n3,16,3\n")
    assert_refused(narrowcast("tune", "study.yaml", "study.trials=2"), "the study study was begun with other data")


@pytest.mark.slow
def test_the_trials_of_a_study_go_on_with_their_own_data_only(folder: Path) -> None:
    """The study's own file stays as it is, and one that its space names changes."""
    (folder / "mall.csv").write_text((folder / "shop.csv").read_text().replace("\n3,15,3\n", "\n3,16,3\n"))
    (folder / "study.yaml").write_text(STUDY.replace("[0.1, 0.2]}", "[0.1, 0.2], data.path: [mall.csv]}"))
    assert narrowcast("tune", "study.yaml").status == 0
    written = (folder / "mall.csv").read_text()
    change(folder / "mall.csv", "\n3,16,3\n", "\n3,14,3\n")
    said = narrowcast("tune", "study.yaml", "study.trials=2")
    assert_refused(said, "the study study was begun with other data from mall.csv", "put back the files")
    (folder / "mall.csv").write_text(written)
    prepared = prepare_study(load_study("study.yaml", ["study.trials=2"]), folder / "runs")
    change(folder / "mall.csv", "\n3,16,3\n", "\n3,14,3\n")  # as on a host whose file is another one
    with pytest.raises(UserError, match=r"was begun with other data from mall\.csv"):
        run_study(prepared)
    (folder / "mall.csv").write_text(written)
    assert narrowcast("tune", "study.yaml", "study.trials=2").status == 0
    assert [row["state"] for row in trials(folder / "runs" / "study")].count("complete") == 2


def test_the_solves_of_a_benchmark_have_one_problem(folder: Path) -> None:
    first = nc.benchmark(folder / "benchmark.yaml", output=folder, progress=False, solvers=["scaled_asd"])
    assert [row["state"] for row in first.rows] == ["finished"]
    change(folder / "entries.csv", "\n2,2,12\n", "\n2,2,13\n")
    second = nc.benchmark(folder / "benchmark.yaml", output=folder, progress=False)
    assert [row["state"] for row in second.rows] == ["finished", "failed"]
    assert "other solves of this benchmark had other data" in second.rows[1]["reason"]
