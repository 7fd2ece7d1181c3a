"""Placement on a real cluster whose nodes have different resources, join, and are killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from narrowcast.cluster.backend import RayBackend
from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.loop import LocalBackend
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run, start
from ray_nodes import RAY

# Forty epochs make a round last long enough for a node to be killed in its midst.
SETTINGS = ("rounds=6", "chunk_size=5", "training.epochs=40", "checkpoint_every=2", "evaluate_every=6")

# A node that does not answer is dead after seconds and not after twenty.
QUICK_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


class Nodes:
    """A Ray cluster whose nodes are separate processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"

    def add(self, *words: str) -> subprocess.Popen[bytes]:
        where = ["--address", self.address] if self.started else ["--head", "--port", self.address.split(":")[1]]
        common = ["--block", "--disable-usage-stats", "--node-ip-address", "127.0.0.1", "--num-cpus", "2"]
        log = self.folder / f"node-{len(self.started)}"
        with log.open("wb") as out:
            node = subprocess.Popen(
                [*RAY, "start", *where, *common, *words],
                env={**os.environ, **QUICK_CHECKS, "RAY_AUTH_MODE": "token"},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.started.append(node)
        deadline = time.monotonic() + 100
        while b"Ray runtime started" not in log.read_bytes():
            assert node.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return node

    @staticmethod
    def kill(node: subprocess.Popen[bytes]) -> None:
        family = psutil.Process(node.pid).children(recursive=True) if node.poll() is None else []
        node.send_signal(signal.SIGKILL)
        node.wait()
        for each in family:
            if each.is_running():
                each.kill()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path_factory.mktemp("nodes"))
    try:
        nodes.add("--include-dashboard", "false")
        yield nodes
    finally:
        for node in reversed(nodes.started):
            nodes.kill(node)


def play(experiment: Experiment) -> Iterator[Outcome]:
    task = experiment.task(experiment.data.load())
    run = Run(experiment, experiment.algorithm, task)
    experiment.backend.check(run)
    yield from experiment.backend.run(run, start(run))


def sha256(experiment: Experiment, outcomes: list[Outcome]) -> str:
    state = outcomes[-1].state
    assert state is not None
    return model_sha256(experiment.algorithm, state)


def check(backend: RayBackend, **plan: int) -> None:
    experiment = load_experiment("fedavg-digits")
    backend.check(Run(Plan(**plan), experiment.algorithm, experiment.task(experiment.data.load())))


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (RayBackend(resources_per_actor={"edge": 1}), 'this machine offers no "edge", only CPU.*; start a node with'),
        (RayBackend(gpus_per_actor=8, actors="auto"), "need 1 CPU and 8 GPU each: this machine has room for 0; lower"),
        (RayBackend(clients_per_actor=1), "a host trains whole chunks, and chunk_size is 30; set chunk_size=1 too"),
    ],
)
def test_what_this_machine_cannot_offer_is_one_line(backend: RayBackend, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(backend)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("placement=scatter", "backend.*placement"),
        ("resources_per_actor={GPU: 1}", "CPUs and GPUs have fields"),
        ("actors=0", "backend.*actors"),
        ("actors=many", "backend.*actors"),
        ("on_failure=panic", "backend.*on_failure"),
    ],
)
def test_placements_that_do_not_exist_are_refused(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_experiment("fedavg-digits", ["backend.kind=ray", f"backend.{override}"])


@pytest.mark.ray
@pytest.mark.slow
def test_hosts_follow_their_resource_from_a_killed_node_to_one_that_joins(nodes: Nodes) -> None:
    backend = RayBackend(address=nodes.address, actors="auto", resources_per_actor={"edge": 1})
    with pytest.raises(UserError, match=f'the cluster at {nodes.address} offers no "edge", only CPU; start a node'):
        check(backend)
    leaving = nodes.add("--resources", '{"edge": 2}')
    with pytest.raises(UserError, match=r'offers no "egde", only CPU, edge; .*Did you mean "edge"\?'):
        check(backend.model_copy(update={"resources_per_actor": {"egde": 1}}))
    with pytest.raises(UserError, match=r"3 client hosts .* has room for 2; lower backend.actors"):
        check(backend.model_copy(update={"actors": 3}))

    experiment = load_experiment("fedavg-digits", SETTINGS)
    alone = list(play(experiment))
    on_nodes, outcomes = experiment.model_copy(update={"backend": backend}), []
    assert isinstance(experiment.backend, LocalBackend)
    for outcome in play(on_nodes):
        outcomes.append(outcome)
        if outcome.record.round == 2:
            nodes.kill(leaving)
            nodes.add("--resources", '{"edge": 1}')
    assert [outcome.record for outcome in outcomes] == [outcome.record for outcome in alone]
    assert sha256(on_nodes, outcomes) == sha256(experiment, alone)
