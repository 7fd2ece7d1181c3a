"""A run submitted to a real cluster of two nodes, tracked by an MLflow server on PostgreSQL and an S3 server."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from mlflow import MlflowClient

import narrowcast as nc
from command_line import assert_refused, narrowcast
from mlflow_server import MlflowServer
from postgres import Postgres
from ray_nodes import RayNodes
from s3_server import S3Server
from studies import EXPERIMENT, RATES, check_whole, ended, write_study

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(600),  # two jobs and two servers, on a machine that may do other things
    pytest.mark.filterwarnings("ignore:ssl=None is deprecated"),  # Ray's client of the jobs' logs
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),
]
STORE = ("tracking.system_metrics=false", "tracking.flush_seconds=110")  # a loaded server may lag
# Twelve epochs make a round last long enough for the job to be stopped in its midst.
ROUNDS = 120
SETTINGS = ("scolr-ml100k", f"rounds={ROUNDS}", "training.epochs=12", "evaluate_every=60", *STORE)
PASSWORD = "correct-horse-battery"


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    cluster = RayNodes(2)
    yield cluster
    cluster.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    folder = tmp_path_factory.mktemp("mlflow")
    database, s3 = Postgres(), S3Server(folder)
    mlflow = MlflowServer(folder, database.url, "s3://runs/artifacts", s3.environment)
    try:
        database.start()
        mlflow.start()
        yield mlflow
    finally:
        mlflow.kill()
        database.remove()
        s3.kill()


@pytest.fixture(autouse=True)
def _token(nodes: RayNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", nodes.token)


def rounds_in(folder: Path) -> int:
    journal = folder / "journal.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def test_a_job_is_joined_stopped_and_taken_up_again_as_if_it_had_run_here(
    nodes: RayNodes, server: MlflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    submit = ("submit", *SETTINGS, "--id", "one", "--address", nodes.address, "--output", runs)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri.replace("//", f"//alice:{PASSWORD}@"))

    first = narrowcast(*submit, "--no-wait", "--env", "NARROWCAST_LOG_FORMAT=json")
    assert (first.status, "one: submitted to" in first.out) == (0, True), first.err
    assert "one: running already; joining it" in narrowcast(*submit, "--no-wait").out
    deadline = time.monotonic() + 120
    while rounds_in(runs / "one") < 20:
        assert time.monotonic() < deadline, narrowcast("jobs", "logs", "one", "--address", nodes.address)
        time.sleep(0.1)
    stopped = narrowcast("jobs", "stop", "one", "--address", nodes.address)
    assert stopped.out.startswith("one: STOPPED"), stopped.err
    finished = rounds_in(runs / "one")
    client = MlflowClient(server.uri)
    run_id = json.loads((runs / "one" / "tracking.json").read_text())["run_id"]
    halted = client.get_run(run_id)
    assert halted.info.status == "KILLED"
    assert len(client.get_metric_history(run_id, "round_wall_seconds")) == finished < ROUNDS
    told = narrowcast("jobs", "logs", "one", "--address", nodes.address)
    lines = [json.loads(line) for line in told.out.splitlines() if line.startswith("{")]
    assert [line["round"] for line in lines if "delivered" in line] == list(range(1, finished + 1))
    assert all(line["run"] == "one" and len(line["clients"]) == 60 for line in lines if "delivered" in line)

    second = narrowcast(*submit)
    assert second.status == 0, second.err
    assert "one: submitted to" in second.out
    assert "(attempt 2)" in second.out
    assert f"round {ROUNDS}/{ROUNDS}" in second.out
    assert "one: finished already (attempt 2)" in narrowcast(*submit, "--no-wait").out

    here = narrowcast("run", *SETTINGS, "--backend", "local", "--output", tmp_path, "tracking.uri=" + server.uri)
    assert here.status == 0, here.err
    there, alone = (
        json.loads((each / "result.json").read_text()) for each in (runs / "one", tmp_path / "scolr-ml100k")
    )
    assert there["model_sha256"] == alone["model_sha256"]
    assert there["uplink_bits"] == alone["uplink_bits"]
    finished = client.get_run(run_id)
    assert finished.info.status == "FINISHED"
    assert client.get_run(run_id).info.artifact_uri.startswith("mlflow-artifacts:")
    stored = client.download_artifacts(run_id, "result.json", str(tmp_path))
    assert json.loads(Path(stored).read_text()) == there
    parts = ("broadcast", "train", "encode", "aggregate", "evaluate", "log")
    assert all(len(client.get_metric_history(run_id, f"{part}_wall_seconds")) == ROUNDS for part in parts)

    assert_no_secret(nodes, runs, first.out + second.out + second.err)
    assert_scraped(nodes, there["uplink_bits"])


def assert_no_secret(nodes: RayNodes, runs: Path, printed: str) -> None:
    """Assert that only the packed folder holds the password of the store, and no list of jobs and no run folder."""
    listed = requests.get(f"{nodes.address}/api/jobs/", headers=nodes.headers, timeout=10).text
    table = narrowcast("jobs", "list", "--address", nodes.address).out
    logs = "".join(narrowcast("jobs", "logs", name, "--address", nodes.address).out for name in ("one", "one.2"))
    written = "".join(path.read_text() for path in runs.glob("one/*.*") if path.suffix in (".yaml", ".json", ".jsonl"))
    assert "one.2" in listed
    assert "SUCCEEDED" in table
    assert "***@" in logs
    for shown in (listed, table, logs, written, printed):
        assert PASSWORD not in shown
        assert nodes.token not in shown


def assert_scraped(nodes: RayNodes, uplink_bits: int) -> None:
    """Assert that the totals that Prometheus reads are those of the run, repeated rounds included."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        counts = {}
        for line in nodes.scraped().splitlines():
            if line.startswith("ray_narrowcast_") and 'run="one"' in line:
                name, _, value = line.partition("{")[0], *line.rpartition(" ")[1:]
                counts[name] = counts.get(name, 0.0) + float(value)
        if counts.get("ray_narrowcast_uplink_bits_total", 0) >= uplink_bits:
            assert counts["ray_narrowcast_clients_total"] >= ROUNDS * 60
            return
        time.sleep(1)
    raise AssertionError(counts)


@pytest.mark.thorough
def test_a_study_is_stopped_and_taken_up_again(
    nodes: RayNodes, server: MlflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    settings = (
        "study: {objectives: {validation.accuracy: maximize}, trials: 6, parallel: 2, holdout: {trials: 1, seeds: 2}}\n"
    )
    tracking = "  tracking: {experiment: studies, system_metrics: false, flush_seconds: 110}\n"
    text = EXPERIMENT.replace("  tracking: {system_metrics: false}\n", tracking) + settings + RATES
    long = ("experiment.rounds=400", "experiment.evaluate_every=20")
    submit = ("submit", write_study(tmp_path, text), *long, "--id", "sweep", "--address", nodes.address)
    submit = (*submit, "--output", tmp_path / "runs")
    folder = tmp_path / "runs" / "sweep"

    first = narrowcast(*submit, "--no-wait")
    assert (first.status, "sweep: submitted to" in first.out) == (0, True), first.err
    deadline = time.monotonic() + 200
    while ended(folder) < 1:
        assert time.monotonic() < deadline, narrowcast("jobs", "logs", "sweep", "--address", nodes.address).out
        time.sleep(0.1)
    assert "sweep: running already; joining it" in narrowcast(*submit, "--no-wait").out
    stopped = narrowcast("jobs", "stop", "sweep", "--address", nodes.address)
    assert stopped.out.startswith("sweep: STOPPED"), stopped.err
    before = ended(folder)

    second = narrowcast(*submit)
    assert second.status == 0, second.err
    assert "(attempt 2)" in second.out
    assert f"continuing after {before} trials" in second.out
    assert "Hold-out evaluation, 2 new seeds" in second.out
    lost = check_whole(folder, server.uri, 6, "studies")
    assert 1 <= len(lost) <= 2
    assert {row["reason"] for row in lost} == {"interrupted"}


def test_what_cannot_run_there_is_said_in_one_line(
    nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = ("--address", nodes.address, "--output", tmp_path / "runs")
    assert_refused(narrowcast("submit", *SETTINGS, "backend.actors=3", *to), "backend.actors = 3", "room for 2")
    huge = narrowcast("submit", *SETTINGS, "backend.actors=1", "backend.cpus_per_actor=2", *to)
    assert_refused(huge, "room for 0", "lower backend.actors")
    assert_refused(narrowcast("jobs", "logs", "nobody", "--address", nodes.address), "no job nobody")
    healthy = narrowcast("doctor", "scolr-ml100k", "--address", nodes.address, "--output", tmp_path)
    assert (healthy.status, "2 nodes, 2 CPUs" in " ".join(healthy.out.split())) == (0, True), healthy.out
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-another-cluster")
    assert_refused(narrowcast("submit", *SETTINGS, *to), "does not accept this token", "RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert_refused(narrowcast("submit", *SETTINGS, *to), "wants a token", "RAY_AUTH_TOKEN")
    assert not os.path.lexists(tmp_path / "runs")


def test_nodes_whose_python_is_not_rays_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = ("submit", *SETTINGS, "backend.actors=1", "--output", tmp_path / "runs")
    other = tmp_path / "bin" / "python"
    other.parent.mkdir()
    for needed in ("bash", "sh", "sleep"):  # by Ray
        (other.parent / needed).symlink_to(str(shutil.which(needed)))
    cluster = RayNodes(1, path=str(other.parent))
    try:
        monkeypatch.setenv("RAY_AUTH_TOKEN", cluster.token)
        for said in ("python: not found", "No module named 'ray'"):
            refused = narrowcast(*submit, "--address", cluster.address)
            assert_refused(refused, said, "its own python first on PATH", status=1)
            other.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # -S: without installed packages
            other.chmod(0o755)
    finally:
        cluster.kill()


@pytest.mark.thorough
def test_a_benchmark_of_solvers_is_a_job(nodes: RayNodes, tmp_path: Path) -> None:
    file, runs = tmp_path / "small.yaml", tmp_path / "runs"
    file.write_text(
        "problems: {a: {kind: synthetic_completion, rows: 60, fraction: 0.5}}\n"
        "solvers: {asd: asd, scaled_asd: scaled_asd, niht: niht}\n"
        "solve: {iterations: 100, spacing: 1.5}\n"
    )
    submit = ("submit", file, "workers=2", "--id", "small", "--address", nodes.address, "--output", runs)
    said = narrowcast(*submit)
    assert said.status == 0, said.err
    assert "[3/3] a." in said.out
    states = [json.loads(line)["state"] for line in (runs / "small" / "instances.jsonl").read_text().splitlines()]
    assert sorted(states) == ["begun"] * 3 + ["finished"] * 3
    assert all(
        (runs / "small" / f"a.{solver}.seed-0" / "result.json").is_file() for solver in ("asd", "scaled_asd", "niht")
    )
    assert "small: finished already" in narrowcast(*submit, "--no-wait").out


def test_a_solve_is_a_job_with_the_answer_of_this_process(nodes: RayNodes, tmp_path: Path) -> None:
    problem = {"kind": "random_max_cut", "proof": "factorisation", "roundings": 20}
    to = ("--address", nodes.address, "--output", tmp_path / "runs")
    said = narrowcast("submit", "max-cut-g1", "iterations=60", f"problem={json.dumps(problem)}", "--id", "cut", *to)
    assert said.status == 0, said.err
    there = json.loads((tmp_path / "runs" / "cut" / "result.json").read_text())
    here = nc.solve("max-cut-g1", {"iterations": 60, "problem": problem}, output=tmp_path, progress=False)
    assert there["answer_sha256"] == here.file.answer_sha256
    assert there["final"] == here.final
    assert there["final"]["gap"] < 0.1
