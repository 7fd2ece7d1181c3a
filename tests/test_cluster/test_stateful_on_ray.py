"""Algorithms with client state, or whose server needs every update, give equal results if actors are killed."""

from __future__ import annotations

import time

import numpy as np
import pytest

from narrowcast.cluster.ray_backend import RayBackend
from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.backend import Backend
from narrowcast.platform.evaluation import model_sha256
from narrowcast.platform.local_backend import LocalBackend
from narrowcast.platform.outcome import Outcome
from narrowcast.platform.run import Run
from ray_actors import kill_one
from running import begin

pytestmark = [pytest.mark.ray, pytest.mark.slow]

# Forty epochs make a round last long enough to be killed in its midst.
SETTINGS = ("rounds=5", "chunk_size=5", "training.epochs=40", "checkpoint_every=2", "evaluate_every=5")


def play(experiment: Experiment, backend: Backend, *, kill_after: int = 0) -> list[Outcome]:
    task = experiment.task(experiment.data.load())
    outcomes = []
    for outcome in backend.run(Run(experiment, experiment.algorithm, task), begin(experiment.algorithm, task)):
        outcomes.append(outcome)
        if outcome.record.round == kill_after:
            time.sleep(0.05)  # the driver is now at work on the next round
            kill_one("ClientHost")
    return outcomes


@pytest.mark.parametrize("algorithm", ["scaffold", "median", "scolr"])
def test_a_killed_host_changes_nothing(algorithm: str) -> None:
    same_when_killed(load_experiment("fedavg-digits", [*SETTINGS, f"algorithm={algorithm}"]))


QUANTISED = "[{kind: quantise, levels: 10, norms: column, rounding: dithered, norm_type: bfloat16}, entropy]"
CHANNEL = f"{{kind: scolr, rank: 16, rank_policy: channel, aggregation: per_component_mean, codec: {QUANTISED}}}"
MEMORY = "{kind: fedmf, codec: [error_feedback, {kind: top_k, fraction: 0.1}, {kind: quantise, levels: 31}, entropy]}"


@pytest.mark.parametrize("algorithm", [CHANNEL, MEMORY], ids=["channel", "memory"])
def test_fading_links_and_memories_of_codecs_change_nothing(algorithm: str) -> None:
    """Channel-adapted ranks and levels on a shared band, and codecs with state per client."""
    allocation = "min_error" if algorithm is CHANNEL else "max_min"
    radio = f"{{channel: {{kind: rayleigh, access: shared}}, allocation: {allocation}, upload_seconds: 0.05}}"
    settings = [*SETTINGS, "training.epochs=8", "clients_per_round=20", f"algorithm={algorithm}", f"radio={radio}"]
    same_when_killed(load_experiment("scolr-ml100k", settings))


def same_when_killed(experiment: Experiment) -> None:
    """Return whether records and states are equal in this process and on two actors of which one is killed."""
    alone, killed = play(experiment, LocalBackend()), play(experiment, RayBackend(actors=2), kill_after=2)
    assert [outcome.record for outcome in killed] == [outcome.record for outcome in alone]
    states = [outcomes[-1].state for outcomes in (alone, killed)]
    assert states[0] is not None
    assert states[1] is not None
    assert model_sha256(experiment.algorithm, states[0]) == model_sha256(experiment.algorithm, states[1])
    for name, values in states[0].clients.items():
        assert np.array_equal(values, states[1].clients[name])
        assert values.any()
