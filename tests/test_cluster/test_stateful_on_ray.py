"""Algorithms whose clients keep state, or whose server needs every update, keep their results on killed actors too."""

from __future__ import annotations

import signal
import time

import numpy as np
import psutil
import pytest

from narrowcast.cluster.runtime import RayRuntime
from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.in_process import LocalRuntime
from narrowcast.platform.rounds import Outcome, Runtime, model_sha256, start

pytestmark = [pytest.mark.ray, pytest.mark.slow]

# Forty epochs make a round last long enough to be killed in its midst.
SETTINGS = ("rounds=5", "chunk_size=5", "training.epochs=40", "checkpoint_every=2", "evaluate_every=5")


def play(experiment: Experiment, runtime: Runtime, *, kill_after: int = 0) -> list[Outcome]:
    task = experiment.task(experiment.data.load())
    outcomes = []
    for outcome in runtime.play(experiment, experiment.algorithm, task, start(experiment.algorithm, task)):
        outcomes.append(outcome)
        if outcome.record.round == kill_after:
            time.sleep(0.05)  # the driver is now at work on the next round
            hosts = [
                process
                for process in psutil.Process().children(recursive=True)
                if any("ray::ClientHost" in part for part in process.cmdline())
            ]
            hosts[0].send_signal(signal.SIGKILL)
    return outcomes


@pytest.mark.parametrize("algorithm", ["scaffold", "median", "fedprox", "scolr"])
def test_a_killed_host_changes_nothing(algorithm: str) -> None:
    experiment = load_experiment("fedavg-digits", [*SETTINGS, f"algorithm={algorithm}"])
    alone, killed = play(experiment, LocalRuntime()), play(experiment, RayRuntime(actors=2), kill_after=2)
    assert [outcome.record for outcome in killed] == [outcome.record for outcome in alone]
    states = [outcomes[-1].state for outcomes in (alone, killed)]
    assert states[0] is not None
    assert states[1] is not None
    assert model_sha256(experiment.algorithm, states[0]) == model_sha256(experiment.algorithm, states[1])
    for name, values in states[0].clients.items():
        assert np.array_equal(values, states[1].clients[name])
        assert values.any()
