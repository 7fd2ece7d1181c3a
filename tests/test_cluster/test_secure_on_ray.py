"""Secure aggregation on Ray gives the model of the local backend, also if hosts are killed; keys have an own actor."""

from __future__ import annotations

import time

import pytest

from narrowcast.cluster.ray_backend import RayBackend
from narrowcast.experiment import load_experiment
from narrowcast.platform.backend import Backend
from narrowcast.platform.evaluation import model_sha256
from narrowcast.platform.local_backend import LocalBackend
from narrowcast.platform.run import Run
from ray_actors import kill_one
from running import begin

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SETTINGS = (
    "algorithm={kind: scolr, rank: 3, rank_policy: uniform}",
    *("model.embedding_dim=8", "clients_per_round=12", "chunk_size=4", "training.epochs=10"),
    *("rounds=4", "checkpoint_every=2", "evaluate_every=4"),
)


def play(secure: str, backend: Backend, *, kill_after: int = 0) -> tuple[str, list[object]]:
    experiment = load_experiment("scolr-ml100k", [*SETTINGS, f"secure={secure}"])
    algorithm, task = experiment.secured_algorithm, experiment.task(experiment.data.load())
    records: list[object] = []
    for outcome in backend.run(Run(experiment, algorithm, task), begin(algorithm, task)):
        records.append(outcome.record)
        state = outcome.state or begin(algorithm, task)
        if outcome.record.round == kill_after:
            time.sleep(0.05)  # the driver is now at work on the next round
            kill_one("ClientHost")
    return model_sha256(algorithm, state), records


@pytest.mark.parametrize(
    "scheme", ["{kind: ckks, ring: 4096, prime_bits: [48, 60], bits: 16}", "{kind: masked, bits: 16}"]
)
def test_a_killed_host_changes_nothing(scheme: str) -> None:
    alone = play(scheme, LocalBackend())
    killed = play(scheme, RayBackend(actors=2), kill_after=2)
    assert killed == alone
