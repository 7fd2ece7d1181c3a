"""Stragglers, availability and buffered schedules give equal results on Ray, also if actors are killed."""

from __future__ import annotations

import time

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
SETTINGS = ("rounds=6", "chunk_size=5", "training.epochs=40", "checkpoint_every=2", "evaluate_every=5")
FLEET = "fleet={kind: lognormal, uplink_mbit_per_second: {median: 0.1, sigma: 1}}"
KINDS = {
    "trained-twice": ["over_selection=1.3", "deadline_seconds=25", "algorithm.codec=quantise", "training.epochs=20"],
    "partial": [
        *("deadline_seconds=20", "stragglers=partial", "clock.seconds_per_example=2e-3"),
        "availability={kind: bernoulli, probability: 0.1}",
    ],
    "buffered": ["schedule={kind: buffered, concurrency: 20, buffer_size: 10}"],
}
every = pytest.mark.parametrize("kind", list(KINDS))


def experiment_of(kind: str) -> Experiment:
    return load_experiment("fedavg-digits", [*SETTINGS, FLEET, "algorithm={kind: fedavg}", *KINDS[kind]])


KILLED_AFTER = {2: "ClientHost", 4: "Driver"}


def simulate(experiment: Experiment, backend: Backend, *, kill: bool = False) -> list[Outcome]:
    task = experiment.task(experiment.data.load())
    outcomes = []
    for outcome in backend.run(Run(experiment, experiment.algorithm, task), begin(experiment.algorithm, task)):
        outcomes.append(outcome)
        if kill and (victim := KILLED_AFTER.get(outcome.record.round)):
            time.sleep(0.05)  # the driver is now at work on the next round
            kill_one(victim)
    return outcomes


@every
def test_killed_actors_change_nothing(kind: str) -> None:
    experiment = experiment_of(kind)
    alone = simulate(experiment, LocalBackend())
    assert sum(outcome.record.late for outcome in alone) > 0 or kind in ("buffered", "partial")
    killed = simulate(experiment, RayBackend(actors=2), kill=True)
    assert [repr(outcome.record) for outcome in killed] == [repr(outcome.record) for outcome in alone]
    assert sha256(experiment, killed) == sha256(experiment, alone)


def sha256(experiment: Experiment, outcomes: list[Outcome]) -> str:
    state = outcomes[-1].state
    assert state is not None
    return model_sha256(experiment.algorithm, state)
