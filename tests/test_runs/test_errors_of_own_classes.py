"""Errors of the user's own classes during a run: one line that names the place, and a folder to resume from."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient

import narrowcast as nc
from command_line import assert_refused, narrowcast
from narrowcast.platform.storage.journal import Journal
from studies import nested_runs, trials

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
MODULE = """
import sys
import torch
from torch import nn

class Moody(nn.Module):
    def __init__(self, mood):
        super().__init__()
        self.mood, self.head = mood, nn.Linear(2, 2)

    def forward(self, x):
        if self.mood != "good" and torch.is_grad_enabled() and x.max() == 9:
            if self.mood == "leaves":
                sys.exit(0)
            if self.mood == "deep":
                return self.forward(x)
            raise ValueError(self.mood)
        return self.head(x)
"""
SETTINGS = """
data: {kind: npz, path: samples.npz, users: users}
model: {kind: torch, factory: 'moody_module:Moody', arguments: {mood: wrong channels}}
training: {kind: sgd, batch_size: 2}
algorithm: fedavg
clients_per_round: 4
rounds: 2
tracking: {system_metrics: false}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an experiment of four clients; one of the samples of the last one makes the module raise."""
    (tmp_path / "moody_module.py").write_text(MODULE)
    users = np.array([0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 3, 3])
    features = np.arange(24, dtype=np.float32).reshape(12, 2) / 24
    features[-1] = 9
    labels = np.arange(12) % 2
    train = {"x_train": features, "y_train": labels, "users_train": users}
    held_out = {
        f"{name}_{part}": values[:4]
        for part in ("validation", "test")
        for name, values in (("x", features), ("y", labels))
    }
    np.savez(tmp_path / "samples.npz", **train, **held_out)
    (tmp_path / "moody.yaml").write_text(SETTINGS)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "moody.yaml"


@pytest.mark.parametrize(
    ("mood", "error"),
    [
        ("wrong channels", "ValueError: wrong channels (moody_module.py, line 17)"),
        ("deep", "RecursionError: maximum recursion depth exceeded"),
        ("leaves", "SystemExit: 0 (moody_module.py, line 14)"),
    ],
)
def test_an_error_in_training_names_round_client_and_step(file: Path, mood: str, error: str) -> None:
    words = ("run", file, f"model.arguments.mood={mood}", "--output", file.parent / "runs", "--backend", "local")
    failed = narrowcast(*words)
    assert_refused(failed, "narrowcast: round 1, client 3, step ", error, "--resume moody", status=1)
    step = re.search(r"step (\d+): ", failed.err)
    assert step is not None
    assert 1 <= int(step[1]) <= 3  # 6 samples in batches of 2
    (run,) = MlflowClient(f"sqlite:///{file.parent}/runs/mlflow.db").search_runs(["1"])
    assert run.info.status == "FAILED"
    again = narrowcast("run", "--resume", "moody", "--output", "runs")
    assert again.err.partition(" [")[0] == failed.err.partition(" [")[0]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("shared_ray")
def test_an_error_on_a_host_names_round_client_and_step(file: Path) -> None:
    words = ("--backend", "ray", "backend.actors=2", "chunk_size=2", "--output", file.parent / "runs")
    failed = narrowcast("run", file, *words)
    place = r"narrowcast: round 1, client 3, step [123]: ValueError: wrong channels \(moody_module.py, line 17\) \["
    assert re.match(place, failed.err.splitlines()[-1]), failed.err
    assert failed.status == 1
    assert "Traceback" not in failed.err
    assert "--resume moody" in failed.err


def test_replicas_that_do_not_fail_go_on(file: Path) -> None:
    moods = "replicas.model.arguments.mood=[good, wrong channels]"
    failed = narrowcast("run", file, moods, "--output", file.parent / "runs", "--backend", "local")
    assert failed.status == 1
    assert "round 1, client 3, step" in failed.err.splitlines()[-1]
    assert "good" not in failed.err.splitlines()[-1]
    (finished,) = (file.parent / "runs").glob("*/result.json")
    assert finished.parent.name == "moody-mood-good"
    assert Journal.read(finished.parent).last_step == 2


@pytest.mark.slow
def test_a_trial_whose_module_raises_fails_with_its_reason(file: Path) -> None:
    study = file.with_name("study.yaml")
    study.write_text(
        "experiment: {base: moody.yaml}\n"
        "study: {objectives: {validation.accuracy: maximize}, trials: 2, sampler: grid, backend: local,\n"
        "        holdout: {trials: 0}}\n"
        "space: {model.arguments.mood: [good, wrong channels]}\n"
    )
    said = narrowcast("tune", study, "--output", file.parent / "runs")
    assert (said.status, said.err) == (0, "")
    rows = {row["model.arguments.mood"]: row for row in trials(file.parent / "runs" / "study")}
    assert rows["good"]["state"] == "complete"
    assert rows["wrong channels"]["state"] == "failed"
    assert rows["wrong channels"]["reason"].startswith("round 1, client 3, step ")
    _, nested = nested_runs(file.parent / "runs")
    assert sorted(each.info.status for each in nested.values()) == ["FAILED", "FINISHED"]


NAN = """
import torch
from torch import nn
from narrowcast.platform.models.measures import CrossEntropy
from narrowcast.platform.models.measures import Accuracy
from typing import Literal

class Loss(CrossEntropy):
    kind: Literal["nan_loss"] = "nan_loss"

    def per_sample(self, outputs, targets):
        return super().per_sample(outputs, targets) * float("nan")

class Two(Accuracy):
    kind: Literal["two"] = "two"

    def per_sample(self, outputs, targets):
        return super().per_sample(outputs, targets)[:2]

def empty(**settings):
    module = nn.Linear(2, 2)
    nn.init.constant_(module.weight, float("nan"))
    return module
"""


@pytest.mark.parametrize(
    ("setting", "phrase"),
    [
        ("model.loss=not_finite:Loss", "of the first model is nan before any training; look at the loss"),
        ("model={kind: torch, factory: 'not_finite:empty'}", "the first weights of the model are not finite"),
        ("model.metrics=[not_finite:Two]", "2 values for 4 samples, expected one for each"),
    ],
)
def test_what_is_wrong_before_any_training_is_not_put_down_to_the_learning_rate(
    file: Path, setting: str, phrase: str
) -> None:
    file.with_name("not_finite.py").write_text(NAN)
    words = ("model.arguments.mood=good", setting, "--output", file.parent / "runs", "--backend", "local")
    failed = narrowcast("run", file, *words)
    assert failed.status in (1, 2)
    assert phrase in failed.err.splitlines()[-1]
    assert "learning_rate" not in failed.err.splitlines()[-1]


def test_the_rounds_of_clients_without_samples_say_so(caplog: pytest.LogCaptureFixture) -> None:
    (outcome,) = nc.rounds("fedavg-digits", {"data.clients": 100_000, "rounds": 1, "clients_per_round": 2})
    assert outcome.record.delivered == 0
    (warning,) = (each.getMessage() for each in caplog.records if "no upload was used" in each.getMessage())
    assert "the clients have no training samples" in warning
