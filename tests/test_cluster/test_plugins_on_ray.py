"""Classes of one file each outside the package: on Ray with a killed actor, in a study, and submitted to two nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from child_processes import kill_one
from command_line import narrowcast
from narrowcast.cluster.backend import RayBackend
from narrowcast.experiment import load_experiment
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.loop import Backend
from narrowcast.platform.rounds.state import Run, start
from ray_nodes import RayNodes

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:ssl=None is deprecated"),
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),
]
EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
OWN = EXAMPLES / "own_everything.yaml"
QUIET = ("tracking.system_metrics=false", "tracking.flush_seconds=110", "rounds=6", "evaluate_every=2")
# Sixty epochs make a round last long enough to be killed in its midst.
LONG = ("rounds=6", "evaluate_every=3", "checkpoint_every=1", "training.epochs=60")


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayNodes]:
    cluster = RayNodes(2)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", cluster.token)
    yield cluster
    cluster.kill()


# First in the file: the clusters of the others give the process an address and a token, which Ray keeps.
def test_a_job_of_ones_own_classes(nodes: RayNodes, tmp_path: Path) -> None:
    submit = ("submit", OWN, *QUIET, "backend.actors=2", "--address", nodes.address, "--output", tmp_path / "runs")
    first = narrowcast(*submit, "--id", "own")
    assert first.status == 0, first.err + first.out
    assert "own: finished already" in narrowcast(*submit, "--id", "own", "--no-wait").out
    here = narrowcast("run", OWN, *QUIET, "backend=local", "--output", tmp_path)
    assert here.status == 0, here.err
    there, alone = (
        json.loads((folder / "result.json").read_text())["model_sha256"]
        for folder in (tmp_path / "runs" / "own", tmp_path / "own_everything")
    )
    assert there == alone


def sha256(backend: Backend, *, kill_after: int = 0) -> str:
    experiment = load_experiment(str(OWN), LONG)
    run = Run(experiment, experiment.algorithm, experiment.task(experiment.data.load()))
    state = start(run)
    for outcome in backend.run(run, state):
        state = outcome.state or state
        if outcome.record.round == kill_after:
            kill_one("ClientHost")
    assert state.round_index == experiment.rounds
    return model_sha256(experiment.algorithm, state)


@pytest.mark.thorough
@pytest.mark.usefixtures("shared_ray")
def test_a_killed_host_changes_nothing() -> None:
    assert sha256(RayBackend(actors=2), kill_after=2) == sha256(load_experiment(str(OWN), ["backend=local"]).backend)


@pytest.mark.usefixtures("shared_ray")
def test_a_study_of_ones_own_classes(tmp_path: Path) -> None:
    study = tmp_path / "own.yaml"
    for example in EXAMPLES.glob("*.py"):
        (tmp_path / example.name).write_text(example.read_text())
    study.write_text(
        f"experiment: {{base: {OWN}, rounds: 4, evaluate_every: 2, tracking: {{system_metrics: false}}}}\n"
        "study: {objectives: {validation.accuracy: maximize}, trials: 4, parallel: 2, holdout: {trials: 0}}\n"
        "space:\n  algorithm.momentum: {kind: float, low: 0.1, high: 0.95}\n"
        "  fleet: ['city_fleet:CityFleet', lognormal]\n"
    )
    said = narrowcast("tune", study, "--output", tmp_path / "studies")
    assert said.status == 0, said.err
