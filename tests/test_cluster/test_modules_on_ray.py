"""Modules of anybody's on the command line, on Ray: an actor that is killed changes neither model, metrics nor bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from child_processes import kill_one
from command_line import done_when, has_rounds, narrowcast
from sampling import sampled

pytestmark = [
    *(pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("shared_ray")),
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),  # of MLflow's queries
]
MODULE = """
from torch import nn

def dropout():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.4), nn.Linear(32, 10))

def batch_norm():
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))

def frozen_body():
    module = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    module[0].requires_grad_(False)
    return module
"""
MODELS = {
    "dropout": "factory: own_modules:dropout",
    "batch norm kept by clients": "factory: own_modules:batch_norm, statistics: local",
    "averaged batch norm": "factory: own_modules:batch_norm, statistics: average",
    "frozen body": "factory: own_modules:frozen_body",
}
ROUNDS, CLIENTS, HEAD = 6, 10, 32 * 10 + 10
MOST_HEADER_BITS = 96  # of a message, and of the client's number of examples, which takes one byte or more


@pytest.mark.parametrize("name", sampled(MODELS, {"batch norm kept by clients", "frozen body"}))
def test_a_killed_actor_changes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_modules.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    alone = result_of("alone", MODELS[name], "--backend", "local")
    killed: list[int] = []
    with done_when(lambda: has_rounds(Path("runs/killed"), 1), lambda: killed.append(kill_one("ClientHost")), 300):
        hosted = result_of("killed", MODELS[name], "--backend", "ray", "backend.actors=2")
    assert killed
    for key in ("model_sha256", "final", "uplink_bits", "downlink_bits", "rounds"):
        assert hosted[key] == alone[key]
    if name == "frozen body":
        assert 32 * HEAD < alone["uplink_bits"] / (ROUNDS * CLIENTS) <= 32 * HEAD + MOST_HEADER_BITS


def result_of(name: str, model: str, *words: str) -> dict[str, Any]:
    """Run digits with many epochs, so that a round lasts long enough to be killed in its midst; return the result."""
    said = narrowcast(
        *("run", "fedavg-digits", f"name={name}", f"model={{kind: torch, {model}}}", "training.batch_size=all"),
        *(f"rounds={ROUNDS}", f"clients_per_round={CLIENTS}", "chunk_size=2", "training.epochs=30", "targets={}"),
        *("data.clients=40", "evaluate_every=3", "tracking.system_metrics=false", *words),
    )
    assert said.status == 0, said.err
    stopped = ("are trained again", "a host was stopped: it did not start")  # on a slow machine it may not have begun
    assert any(words in said.err for words in stopped) is (name == "killed"), said.err
    return dict(json.loads((Path("runs") / name / "result.json").read_text()))
