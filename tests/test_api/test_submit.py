"""An experiment built in Python is submitted to a real cluster, waited for, stopped and resumed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import narrowcast as nc
from narrowcast.platform.rounds.evaluation import model_sha256
from ray_nodes import RayNodes

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:ssl=None is deprecated"),  # Ray's client of the jobs' logs
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),
]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayNodes]:
    cluster = RayNodes(1)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", cluster.token)
    yield cluster
    cluster.kill()


def experiment() -> nc.Experiment:
    return nc.Experiment(
        name="from-python",
        data=nc.data.Digits(clients=20),
        model=nc.models.MLP(),
        algorithm=nc.algorithms.FedAvg(),
        training={"kind": "sgd", "epochs": 10},  # so that a round lasts long enough to be stopped in its midst
        backend=nc.backends.LocalBackend(),
        rounds=40,
        tracking={"system_metrics": False},
    )


@pytest.mark.thorough  # test_jobs.py has a job that is stopped and taken up again
def test_a_job_is_stopped_and_resumed_to_the_results_of_a_run_here(nodes: RayNodes, tmp_path: Path) -> None:
    built, runs = experiment(), tmp_path / "runs"

    def submit(**overrides: object) -> nc.ClusterJob:
        return nc.submit(built, overrides, name="one", address=nodes.address, output=str(runs))

    with pytest.raises(nc.UserError, match=r"backend\.actors = 3 .* has room for 1"):
        submit(backend={"kind": "ray", "actors": 3})
    job = submit()
    assert job.name == "one"
    assert submit() == job  # which joins it
    journal = runs / "one" / "journal.jsonl"
    deadline = time.monotonic() + 120
    while not journal.exists() or journal.read_bytes().count(b"\n") < 3:
        assert time.monotonic() < deadline, job.logs()
        time.sleep(0.1)
    with pytest.raises(TimeoutError, match="one is RUNNING after 0 s"):
        job.wait(timeout_seconds=0)
    assert (job.stop(), job.status()) == ("STOPPED", "STOPPED")
    with pytest.raises(nc.RunFailed, match="one is STOPPED"):
        job.wait()

    resumed = submit()
    assert (resumed.wait(), resumed.status()) == ("SUCCEEDED", "SUCCEEDED")
    assert "resuming after round" in resumed.logs()
    with pytest.raises(nc.UserError, match="one is a job of another configuration"):
        submit(rounds=3)
    *_, here = nc.rounds(built)
    assert here.state is not None
    assert nc.load_run("one", output=runs).model_sha256 == model_sha256(built.algorithm, here.state)
