"""`start_from`: a run begins with the model of another, and is resumed and verified without it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from command_line import assert_refused, narrowcast
from narrowcast.experiment import load_experiment
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.state import start
from narrowcast.runs.prepared import prepare
from narrowcast.runs.verification import verify

pytestmark = pytest.mark.filterwarnings(
    "ignore:The ``noload`` loader strategy:DeprecationWarning",  # MLflow's SQL store
    "ignore::sqlalchemy.exc.SADeprecationWarning",
)
SMALL = (
    *("fedavg-digits", "rounds=2", "evaluate_every=2", "checkpoint_every=1", "data.clients=10"),
    *("clients_per_round=3", "model.hidden=[4]", "tracking.system_metrics=false", "backend.kind=local"),
)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("first")
    said = narrowcast("run", *SMALL, "name=first", "--output", output)
    assert said.status == 0, said.err
    return output / "first"


def started(folder: Path, *overrides: str) -> dict[str, np.ndarray]:
    experiment = load_experiment(SMALL[0], [*SMALL[1:], f"start_from={folder}", *overrides])
    run = prepare(experiment, folder.parent).run
    return {name: np.asarray(values) for name, values in run.algorithm.final(start(run).server).items()}


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "scolr", "{kind: fedavg, server_optimizer: adam}"])
def test_round_1_begins_with_the_model_of_the_other_run(first: Path, algorithm: str) -> None:
    model = load_file(first / "model.safetensors")
    for place in (first, first / "model.safetensors"):
        begun = started(place, f"algorithm={algorithm}")
        assert begun.keys() == model.keys()
        assert all(np.array_equal(begun[name], model[name]) for name in model)
    assert {values.dtype for values in started(first, "model.dtype=float64").values()} == {np.dtype(np.float64)}


@pytest.mark.slow
def test_a_run_is_resumed_and_verified_after_the_other_is_gone(first: Path, tmp_path: Path) -> None:
    gone = Path(shutil.copytree(first, tmp_path / "gone"))
    said = narrowcast("run", *SMALL, "name=second", f"start_from={gone}", "--output", tmp_path)
    assert said.status == 0, said.err
    shutil.rmtree(gone)
    assert not [check for check in verify(tmp_path / "second", 2) if check.problem]
    assert_refused(
        narrowcast("run", *SMALL, "name=third", f"start_from={gone}", "--output", tmp_path),
        f"start_from = {gone}: no model there",
    )
    said = narrowcast("run", "--resume", "second", "rounds=4", "--output", tmp_path)
    assert said.status == 0, said.err
    result = json.loads((tmp_path / "second" / "result.json").read_text())
    other = narrowcast("run", *SMALL, "name=whole", "rounds=4", f"start_from={first}", "--output", tmp_path)
    assert other.status == 0, other.err
    assert result["model_sha256"] == json.loads((tmp_path / "whole" / "result.json").read_text())["model_sha256"]


def test_what_is_not_its_model_is_refused(first: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes((first / "model.safetensors").read_bytes()[:100])
    with pytest.raises(UserError, match=r"no model there .*give the folder of a finished run, or a safetensors file"):
        started(damaged)
    save_file({"other": np.zeros(3, dtype=np.float32)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=r"its model has other \[3\], this experiment's .*\[4, 64\]"):
        started(tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=r"this experiment's .*\[5, 64\]"):
        started(first, "model.hidden=[5]")
    with pytest.raises(UserError, match="fedpara draws factors"):
        started(first, "algorithm=fedpara")
