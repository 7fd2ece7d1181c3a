"""Results on Ray are those of the local backend, also if hosts or the driver are killed: real Ray, data and kills."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import ray

from child_processes import kill_one
from narrowcast.cluster.backend import RayBackend
from narrowcast.cluster.decisions import FailurePolicy
from narrowcast.cluster.executor import RayExecutor
from narrowcast.cluster.hosts import ClientHost, Host
from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.errors import RunFailed
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.loop import Backend, LocalBackend, LocalExecutor
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.types import Chunk
from running import begin

pytestmark = [pytest.mark.ray, pytest.mark.slow]
join = pytest.mark.usefixtures("shared_ray")  # the first test starts a cluster of its own

ROUNDS = 6
# Fifteen to a chunk makes four chunks; twelve epochs make a round last long enough to be killed in its midst.
SETTINGS = (
    *(f"rounds={ROUNDS}", "chunk_size=15", "training.epochs=12", "checkpoint_every=2"),
    *("evaluate_every=3", "evaluate_clients=[test,validation]"),
)


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return load_experiment("scolr-ml100k", SETTINGS)


@pytest.fixture(scope="module")
def in_process(experiment: Experiment) -> list[Outcome]:
    return list(play(experiment, LocalBackend()))


def play(experiment: Experiment, backend: Backend) -> Iterator[Outcome]:
    task = experiment.task(experiment.data.load())
    yield from backend.run(Run(experiment, experiment.algorithm, task), begin(experiment.algorithm, task))


def sha256(experiment: Experiment, outcomes: list[Outcome]) -> str:
    state = outcomes[-1].state
    assert state is not None
    return model_sha256(experiment.algorithm, state)


def assert_same(experiment: Experiment, outcomes: list[Outcome], in_process: list[Outcome]) -> None:
    assert sha256(experiment, outcomes) == sha256(experiment, in_process)
    assert [outcome.record for outcome in outcomes] == [outcome.record for outcome in in_process]
    assert [outcome.metrics for outcome in outcomes] == [outcome.metrics for outcome in in_process]
    for outcome, other in zip(outcomes, in_process, strict=True):
        assert outcome.client_metrics.keys() == other.client_metrics.keys()
        for name, values in outcome.client_metrics.items():
            np.testing.assert_array_equal(values, other.client_metrics[name])
    assert len(outcomes[-1].client_metrics["test.ndcg@10"]) == 943


def test_ray_gives_the_in_process_results(experiment: Experiment, in_process: list[Outcome]) -> None:
    """On four actors, one per chunk; the tests below have one and two."""
    assert_same(experiment, list(play(experiment, RayBackend(actors=4))), in_process)


@join
def test_client_hosts_killed_in_mid_round_change_nothing(experiment: Experiment, in_process: list[Outcome]) -> None:
    outcomes, killed = [], []
    for outcome in play(experiment, RayBackend(actors=2)):
        outcomes.append(outcome)
        if outcome.record.round in (1, 3):
            time.sleep(0.05)  # the driver is now at work on a later round
            killed.append(kill_one("ClientHost"))
    assert len(set(killed)) == 2
    assert_same(experiment, outcomes, in_process)


@join
def test_a_killed_driver_starts_over_from_the_last_state(experiment: Experiment, in_process: list[Outcome]) -> None:
    outcomes = []
    for outcome in play(experiment, RayBackend(actors=1)):
        outcomes.append(outcome)
        if outcome.record.round == 3:
            kill_one("Driver")
    assert_same(experiment, outcomes, in_process)


@join
def test_new_clients_are_measured_alike_on_client_hosts() -> None:
    settings = ["new_clients=0.2", "rounds=3", "evaluate_every=3", "chunk_size=7"]
    ditto = load_experiment("ditto-digits", settings)
    last, in_process = (list(play(ditto, backend))[-1] for backend in (RayBackend(actors=2), LocalBackend()))
    assert last.metrics == in_process.metrics
    assert np.isfinite(in_process.client_metrics["new.test.accuracy"]).sum() == 10
    for name, values in in_process.client_metrics.items():
        np.testing.assert_array_equal(last.client_metrics[name], values)


@join
def test_too_many_failures_end_the_run_with_advice(experiment: Experiment) -> None:
    with pytest.raises(RunFailed, match=r"backend.max_failures"):
        for outcome in play(experiment, RayBackend(actors=1, max_failures=0)):
            if outcome.record.round == 1:
                kill_one("ClientHost")


@ray.remote(num_cpus=0)
class DiesMeasuring:
    def measure(self, *_: object) -> None:
        os._exit(1)


@dataclass
class TwoHosts:
    """One host that measures, and one that dies of it."""

    run: Run

    def ready(self) -> list[Host]:
        actors = (ClientHost.remote(ray.put(self.run), None), DiesMeasuring.remote())  # type: ignore[attr-defined]
        return [Host(actor, "here", 0.0, None) for actor in actors]


@join
def test_clients_of_a_host_that_dies_are_measured_by_the_driver(experiment: Experiment) -> None:
    run = Run(experiment, experiment.algorithm, experiment.task(experiment.data.load()))
    server, clients = (of(run.task) for of in (run.algorithm.init, run.algorithm.init_clients))
    chunks = [
        Chunk(1, index, part, {name: values[part] for name, values in clients.items()})
        for index, part in enumerate(np.split(np.arange(300), 3))
    ]
    hosts: Any = TwoHosts(run)
    executor = RayExecutor(run, hosts, FailurePolicy("redo", 0, 60.0), threading.Event())
    ray.init(log_to_driver=False)
    try:
        found = executor.measure(server, chunks, ("test",))
    finally:
        ray.shutdown()
    for each, other in zip(found, LocalExecutor(run).measure(server, chunks, ("test",)), strict=True):
        np.testing.assert_array_equal(each.metrics["test.ndcg@10"], other.metrics["test.ndcg@10"])
