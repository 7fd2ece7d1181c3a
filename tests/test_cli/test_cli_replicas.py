"""Replicas from the command line: runs of their own, played as one program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from command_line import assert_refused, narrowcast, run_folders, terminated_after

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")

DIGITS = ("fedavg-digits", "--backend", "local", "rounds=4", "tracking.system_metrics=false")


def result(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return read


@pytest.mark.slow
def test_each_replica_is_the_run_it_would_be_alone(tmp_path: Path) -> None:
    said = narrowcast(
        "run", *DIGITS, "--output", tmp_path, "replicas.seed=[0,5]", "replicas.training.learning_rate=[0.1,0.2]"
    )
    assert (said.status, said.err) == (0, "")
    names = [f"fedavg-digits-seed-{seed}-learning_rate-{rate}" for seed in (0, 5) for rate in (0.1, 0.2)]
    assert run_folders(tmp_path) == sorted(names)
    again = narrowcast("run", *DIGITS, "--output", tmp_path, "replicas.seed=[0,5]")
    assert (again.status, again.err) == (0, "")
    partitions = {(tmp_path / f"fedavg-digits-seed-{seed}/partition/partition.parquet").read_bytes() for seed in (0, 5)}
    assert len(partitions) == 2, "each replica has a partition of its own"
    for seed in (0, 5):
        alone = narrowcast("run", *DIGITS, "--output", tmp_path, f"seed={seed}", f"name=alone-{seed}")
        assert alone.status == 0
        one, other = result(tmp_path / f"alone-{seed}"), result(tmp_path / f"fedavg-digits-seed-{seed}")
        assert one["model_sha256"] == other["model_sha256"]
        assert one["final"] == other["final"]
    table = [line.split() for line in said.out.splitlines() if line.strip().startswith(("0.1 ", "0.2 "))]
    assert [row[1] for row in table] == ["2", "2"]
    accuracies = [100 * result(tmp_path / name)["final"]["test.accuracy"] for name in names if name.endswith("0.1")]
    assert f"{sum(accuracies) / 2:.2f}" == table[0][2]

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    for name in names:
        run = client.get_run(result(tmp_path / name)["mlflow_run_id"])
        assert run.info.status == "FINISHED"
        assert run.data.params["training.learning_rate"] == name.rpartition("-")[2]


@pytest.mark.slow
def test_an_interrupted_set_of_replicas_goes_on_together(tmp_path: Path) -> None:
    settings = (*DIGITS, "--output", tmp_path, "rounds=60", "checkpoint_every=1", "replicas.seed=[0,1]")
    names = ["fedavg-digits-seed-0", "fedavg-digits-seed-1"]
    with terminated_after(3, tmp_path / names[1]):
        said = narrowcast("run", *settings)
    again = f"narrowcast run --resume {names[0]} --resume {names[1]} --output {tmp_path}"
    assert_refused(said, f"interrupted; resume with: {again}", status=1)
    resumed = narrowcast(*again.split()[1:])
    assert (resumed.status, resumed.err) == (0, "")
    whole = tmp_path / "whole"
    assert narrowcast("run", *settings, "--output", whole).status == 0
    for name in names:
        assert result(tmp_path / name)["model_sha256"] == result(whole / name)["model_sha256"]


def test_a_replica_that_fails_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    settings = ("replicas.algorithm.server_learning_rate=[1.0,3e38]", "training.learning_rate=50")
    said = narrowcast("run", *DIGITS, "--output", tmp_path, *settings)
    assert said.status == 1
    assert "fedavg-digits-server_learning_rate-3e38: round " in said.err.splitlines()[-1]
    assert result(tmp_path / "fedavg-digits-server_learning_rate-1.0")["rounds"] == 4
    assert not (tmp_path / "fedavg-digits-server_learning_rate-3e38" / "result.json").exists()


@pytest.mark.parametrize(
    ("words", "phrases"),
    [
        (["replicas.seed=[]"], ["replicas.seed = []", "list of different values"]),
        (["replicas.seed=3"], ["replicas.seed = 3", "list of different values"]),
        (["replicas.seed=[1,1]"], ["replicas.seed = [1, 1]", "list of different values"]),
        (["replicas=[1,2]"], ["replicas = [1, 2]", "list of different values"]),
        (["replicas.seed=[0,x]"], ["seed = 'x'", "should be a valid integer"]),
        (["replicas.algorithm.rnk=[1,2]"], ["algorithm.rnk is unknown"]),
        (["replicas.data.seed=[0,1]"], ["replicas.data.seed: replicas share data; start runs of their own"]),
        (
            ["replicas.seed=[0,1]", "--backend", "ray"],
            ["replicas run in lockstep in this process; add --backend local"],
        ),
    ],
)
def test_what_cannot_be_replicated(tmp_path: Path, words: list[str], phrases: list[str]) -> None:
    said = narrowcast("run", *DIGITS, "--output", tmp_path, *words)
    assert_refused(said, *phrases)
    assert run_folders(tmp_path) == []


def test_one_experiment_is_shown_at_a_time() -> None:
    assert_refused(
        narrowcast("show", "fedavg-digits", "replicas.seed=[0,1]"), "is one of 2 replicas; leave replicas out"
    )


@pytest.mark.slow
def test_many_replicas_are_resumed_by_a_pattern_of_their_names(tmp_path: Path) -> None:
    words = ("fedavg-digits", "rounds=200", "data.clients=20", "name=many", "replicas.seed=[0,1,2,3,4]")
    with terminated_after(2, tmp_path / "many-seed-0"):
        stopped = narrowcast("run", *words, "tracking.system_metrics=false", "--backend", "local", "--output", tmp_path)
    assert_refused(stopped, "--resume 'many-seed-*' --output", status=1)
    again = narrowcast("run", "--resume", "many-seed-*", "rounds=210", "--output", tmp_path)
    assert again.status == 0, again.err
    assert len(list(tmp_path.glob("many-seed-*/result.json"))) == 5
