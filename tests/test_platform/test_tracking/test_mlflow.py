"""The record of a run in real MLflow stores: an SQLite file, and a server."""

from __future__ import annotations

import base64
import json
import math
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from command_line import assert_refused, narrowcast
from mlflow_server import MlflowServer
from narrowcast.platform.config.files import flatten
from narrowcast.platform.config.run_fields import StoreAddress, Tracking
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.state import RunState
from narrowcast.platform.storage.checkpoint import load_checkpoint
from narrowcast.platform.storage.journal import locked
from narrowcast.platform.tracking import sender
from narrowcast.platform.tracking.store import pages_of_runs
from narrowcast.platform.tracking.view import set_up_view
from narrowcast.runs import session
from narrowcast.runs.outputs import git_commit, write_outputs
from narrowcast.runs.prepared import prepare, prepare_resume
from narrowcast.runs.session import sync_run
from tracked_run import ROUNDS, TrackedRun, assert_each_round_is_there_once, load, nothing, run_tracked

# MLflow's SQL store uses what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, drawn: None) -> TrackedRun:
    experiment = load("tracking.system_metrics=true")
    prepared = prepare(experiment, tmp_path_factory.mktemp("runs"))
    client = MlflowClient(prepared.store.uri)

    def wait_for_a_sample(row: Mapping[str, Any]) -> None:
        deadline = time.monotonic() + 60
        while row["round"] == ROUNDS and time.monotonic() < deadline:
            (run,) = client.search_runs([client.get_experiment_by_name("narrowcast").experiment_id])
            if any(name.startswith("system/") for name in run.data.metrics):
                return
            time.sleep(0.1)

    result = session.run(prepared, wait_for_a_sample)
    return TrackedRun(experiment, prepared.folder, result, client)


@pytest.mark.slow
def test_all_of_the_configuration_is_in_params(finished: TrackedRun) -> None:
    expected = flatten(finished.experiment.plain())
    assert finished.run.data.params == {key: str(value) for key, value in expected.items()}
    assert finished.run.data.params["algorithm.rank_policy.upload_seconds"] == "0.05"
    assert finished.run.data.params["fleet.tiers.0.name"] == "2g"


def test_each_round_of_the_journal_is_in_metrics(finished: TrackedRun) -> None:
    assert_each_round_is_there_once(finished)
    evaluated = [row["round"] for row in finished.rounds if "test.hr@10" in row]
    assert [step for step, *_ in finished.history("test.hr_at_10")] == evaluated == [2, 4, 6, 8]
    assert finished.run.data.metrics["total_uplink_bits"] == finished.result["uplink_bits"]
    assert finished.run.data.metrics["simulated_seconds"] == finished.result["simulated_seconds"]
    assert finished.run.data.metrics["wall_seconds"] == finished.result["wall_seconds"]


def test_the_machines_load_is_in_metrics(finished: TrackedRun) -> None:
    assert finished.run.data.metrics["system/cpu_utilization_percentage"] >= 0
    assert finished.run.data.metrics["system/system_memory_usage_megabytes"] > 0


def test_tags_status_and_data_set(finished: TrackedRun) -> None:
    run = finished.run
    tags = {name: run.data.tags[name] for name in ("algorithm", "data", "backend", "git_commit", "model_sha256")}
    assert tags == {
        "algorithm": "scolr",
        "data": "ml-100k",
        "backend": "local",
        "git_commit": git_commit() or "unknown",
        "model_sha256": finished.result["model_sha256"],
    }
    assert run.info.status == "FINISHED"
    assert run.info.run_name == finished.folder.name
    (given,) = run.inputs.dataset_inputs
    assert given.dataset.name == "ml-100k"
    assert {tag.key: tag.value for tag in given.tags} == {"mlflow.data.context": "training"}


def test_artifacts_are_the_files_of_the_run(finished: TrackedRun, tmp_path: Path) -> None:
    run_id = finished.run.info.run_id
    names = {entry.path for entry in finished.client.list_artifacts(run_id)}
    files = {"clients.parquet", "config.yaml", "model.safetensors", "result.json", "rounds.parquet"}
    assert names == files | {"checkpoint", "partition", "plots"}
    copy = Path(finished.client.download_artifacts(run_id, "", str(tmp_path)))
    stored = {path.relative_to(copy): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    local = {path.relative_to(finished.folder): path.read_bytes() for path in finished.folder.rglob("*.*")}
    assert any(path.parent.name == "plots" for path in stored)
    assert stored == {path: local[path] for path in local if path.name not in ("journal.jsonl", "tracking.json")}


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_what_is_too_large_for_the_store_stays_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sender, "_LARGEST_ARTIFACT_BYTES", 500_000)
    played = run_tracked(tmp_path, load("tracking.system_metrics=false"))
    large = {name for name, size in sizes(played.folder).items() if size > 500_000}
    assert {name.partition("-")[0] for name in large} == {"round"}
    copy = Path(played.client.download_artifacts(played.run.info.run_id, "", str(tmp_path / "copy")))
    assert sizes(copy).keys() == sizes(played.folder).keys() - large - {"journal.jsonl", "tracking.json"}
    assert caplog.text.count("is too large for MLflow and stays there") == len(large)
    assert played.run.info.status == "FINISHED"


def test_a_resumed_run_goes_on_in_the_same_mlflow_run(finished: TrackedRun, tmp_path: Path) -> None:
    prepared = prepare(load("tracking.system_metrics=false"), tmp_path)
    client = MlflowClient(prepared.store.uri)

    def interrupt(row: Mapping[str, Any]) -> None:
        if row["round"] == 5:  # the last checkpoint is of round 3
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.run(prepared, interrupt)
    (killed,) = client.search_runs([client.get_experiment_by_name("narrowcast").experiment_id])
    assert killed.info.status == "KILLED"
    params = killed.data.params
    played = []

    resumed = prepare_resume(prepared.folder, None)
    result = session.run(resumed, lambda row: played.append(row["round"]))
    assert played == [4, 5, 6, 7, 8]
    assert result["mlflow_run_id"] == killed.info.run_id
    assert result["model_sha256"] == finished.result["model_sha256"]
    assert result["uplink_bits"] == finished.result["uplink_bits"]
    after = TrackedRun(resumed.experiment, prepared.folder, result, client)
    assert after.run.info.status == "FINISHED"
    assert after.run.data.params == params
    assert_each_round_is_there_once(after)


KILLED = """
import os, signal, sys
from pathlib import Path
from narrowcast.platform.tracking.cursor import Cursor
from narrowcast.runs import session

Cursor.save = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # the store has the run, and its folder does not know
(prepared,) = session.prepare_runs("fedavg-digits", ["name=run", "rounds=1", "backend=local"], Path(sys.argv[1]))
session.run(prepared, lambda _: None)
"""


@pytest.mark.slow
def test_a_run_that_was_killed_before_it_knew_its_own_is_ended_by_the_next_of_its_folder(tmp_path: Path) -> None:
    for _ in range(2):
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path)], check=False, timeout=250)
        assert done.returncode == -signal.SIGKILL
        shutil.rmtree(tmp_path / "run")
    address = StoreAddress(f"sqlite:///{tmp_path}/mlflow.db")
    other = sender.open_run(tmp_path / "other", Tracking(), {}, {}, {}, address)
    last = sender.open_run(tmp_path / "run", Tracking(), {}, {}, {}, address)
    client = MlflowClient(address.uri)
    runs = client.search_runs([client.get_experiment_by_name("narrowcast").experiment_id])
    states = {each.info.run_id: each.info.status for each in runs}
    assert (states.pop(other.run_id), states.pop(last.run_id)) == ("RUNNING", "RUNNING")
    assert list(states.values()) == ["KILLED", "KILLED"]


KILLED_IN_ROUND_3 = """
import os, signal, sys
from pathlib import Path
from narrowcast.runs import session

settings = [f"name={sys.argv[2]}", "rounds=9", "backend=local", "tracking.system_metrics=false"]
(prepared,) = session.prepare_runs("fedavg-digits", settings, Path(sys.argv[1]))
session.run(prepared, lambda row: os.kill(os.getpid(), signal.SIGKILL) if row["round"] == 3 else None)
"""


@pytest.mark.slow
def test_a_killed_run_that_nobody_resumes_is_ended_by_the_next_start_or_by_sync(tmp_path: Path) -> None:
    def killed(name: str) -> None:
        command = [sys.executable, "-W", "ignore", "-c", KILLED_IN_ROUND_3, str(tmp_path), name]
        assert subprocess.run(command, check=False, timeout=250).returncode == -signal.SIGKILL

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")

    def states() -> dict[str, str]:
        runs = client.search_runs([client.get_experiment_by_name("narrowcast").experiment_id])
        return {each.info.run_name: each.info.status for each in runs}

    killed("living")
    with locked(tmp_path / "living"):  # as its process would
        killed("killed")
        assert states() == {"living": "RUNNING", "killed": "RUNNING"}
        (prepared,) = session.prepare_runs("fedavg-digits", ["name=next", "rounds=1", "backend=local"], tmp_path)
        session.run(prepared, nothing)
        assert states() == {"killed": "KILLED", "living": "RUNNING", "next": "FINISHED"}
        said = narrowcast("sync", tmp_path)
        assert_refused(said, f"another process is at work on {tmp_path / 'living'}; wait until it ends, or stop it")
        assert said.out == "killed: 3 rounds sent, MLflow is up to date\nnext: 0 rounds sent, MLflow is up to date\n"
    assert states()["living"] == "RUNNING"
    assert narrowcast("sync", tmp_path / "living").out == "living: 3 rounds sent, MLflow is up to date\n"
    assert states() == {"killed": "FAILED", "living": "FAILED", "next": "FINISHED"}
    for name in ("killed", "living"):
        run_id = json.loads((tmp_path / name / "tracking.json").read_text())["run_id"]
        assert [each.step for each in client.get_metric_history(run_id, "round_wall_seconds")] == [1, 2, 3]
    resumed = prepare_resume(tmp_path / "killed", None)
    session.run(resumed, nothing)
    assert states()["killed"] == "FINISHED"


@pytest.mark.slow
def test_an_interrupt_while_the_result_is_written_finds_the_run_over(
    finished: TrackedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_interrupted(*args: Any) -> dict[str, Any]:
        signal.raise_signal(signal.SIGINT)
        return write_outputs(*args)

    monkeypatch.setattr("narrowcast.runs.prepared.write_outputs", write_interrupted)
    prepared = prepare(load("tracking.system_metrics=false"), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        session.run(prepared, nothing, keep_checkpoints=False)
    result = json.loads((prepared.folder / "result.json").read_text())
    assert result["model_sha256"] == finished.result["model_sha256"]
    assert not (prepared.folder / "checkpoint").exists()
    run = MlflowClient(prepared.store.uri).get_run(result["mlflow_run_id"])
    assert (run.info.status, run.data.tags["model_sha256"]) == ("FINISHED", result["model_sha256"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path_factory.mktemp("server"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.mark.slow
def test_a_server_gets_a_batch_a_round_at_most(server: MlflowServer, tmp_path: Path, finished: TrackedRun) -> None:
    before = server.requests_for("runs/log-batch")
    played = run_tracked(tmp_path, load("tracking.system_metrics=false", f"tracking.uri={server.uri}"))
    assert_each_round_is_there_once(played)
    assert played.run.info.status == "FINISHED"
    assert played.run.data.tags["model_sha256"] == finished.result["model_sha256"]
    assert {entry.path for entry in played.client.list_artifacts(played.run.info.run_id)} >= {"config.yaml", "plots"}
    # One batch more for the params, and one for the last tags; a server that lags gets several rounds in one.
    assert 3 <= server.requests_for("runs/log-batch") - before <= ROUNDS + 2


@pytest.mark.slow
def test_a_loss_that_is_no_number_reaches_a_server(server: MlflowServer, tmp_path: Path) -> None:
    """A round without available clients delivers nothing, and has no loss."""
    settings = ("availability={kind: bernoulli, probability: 0.001}", "tracking.system_metrics=false")
    played = run_tracked(tmp_path, load(*settings, f"tracking.uri={server.uri}"))
    there = [row["delivered"] > 0 for row in played.rounds]
    assert any(there)
    assert not all(there)
    assert [not math.isnan(value) for _, value, _ in played.history("loss")] == there
    assert ("loss" in played.result["final"]) == there[-1]
    assert sync_run(played.folder, None) == 0


@pytest.mark.slow
def test_a_name_that_was_taken_meanwhile_is_refused(tmp_path: Path) -> None:
    quiet = "tracking.system_metrics=false"
    first, second = (prepare(load(quiet, f"seed={seed}"), tmp_path) for seed in (1, 2))
    result = session.run(first, nothing)
    with pytest.raises(UserError, match=f"another run has just taken {first.folder}; start this one again"):
        session.run(second, nothing)
    client = MlflowClient(first.store.uri)
    (run,) = client.search_runs([client.get_experiment_by_name("narrowcast").experiment_id])
    assert run.data.params["seed"] == "1"
    assert prepare_resume(first.folder, None).experiment.seed == 1
    assert load_checkpoint(first.folder / "checkpoint", RunState)[0].uplink_bits == result["uplink_bits"]


@pytest.mark.slow
def test_a_store_that_does_not_know_the_run_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    played = run_tracked(tmp_path, load("tracking.system_metrics=true"))
    store = f"sqlite:///{tmp_path}/other.db"
    prepared = prepare_resume(played.folder, load("tracking.system_metrics=true", f"tracking.uri={store}"))
    result = session.run(prepared, nothing)
    assert f"other.db has no run {played.run.info.run_id}, or it was deleted" in caplog.text
    again = TrackedRun(played.experiment, played.folder, result, MlflowClient(store))
    assert_each_round_is_there_once(again)
    assert again.run.info.status == "FINISHED"
    assert result["model_sha256"] == played.result["model_sha256"]


def test_the_page_of_the_runs_has_columns_and_charts_of_what_they_measured(finished: TrackedRun) -> None:
    experiment = finished.client.get_experiment(finished.run.info.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    assert {"test.hr_at_10", "validation.ndcg_at_10"} <= set(experiment.tags["narrowcast.metrics"].split(","))
    packed = experiment.tags["mlflow.sharedViewState.narrowcast"].removeprefix("deflate;")
    state = json.loads(zlib.decompress(base64.b64decode(packed)))
    shown = [each for each in state["selectedColumns"] if each.startswith("metrics.")]
    assert shown[:3] == ["metrics.`test.hr_at_10`", "metrics.`test.ndcg_at_10`", "metrics.`total_uplink_bits`"]
    measured = finished.run.data.metrics
    assert {each.split("`")[1] for each in shown} <= set(measured)
    assert {chart["metricKey"] for chart in state["compareRunCharts"]} <= set(measured)
    sections = {each["uuid"] for each in state["compareRunSections"]}
    assert {chart["metricSectionId"] for chart in state["compareRunCharts"]} <= sections
    assert not any("/" in name for name in measured if not name.startswith("system/"))  # a section for each would be
    assert pages_of_runs(StoreAddress(f"sqlite:///{finished.folder.parent}/mlflow.db")) == {
        "narrowcast": f"#/experiments/{experiment.experiment_id}/runs"
        "?workflowType=machine_learning&viewStateShareKey=narrowcast"
    }


@pytest.mark.slow
def test_an_experiment_keeps_the_columns_of_its_earlier_runs(tmp_path: Path) -> None:
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment_id = client.create_experiment("both")
    for measured in ({"test.accuracy": 1.0, "loss": 1.0}, {"test.hr_at_10": 1.0}):
        set_up_view(client, experiment_id, measured)
    tags = client.get_experiment(experiment_id).tags
    assert tags["narrowcast.metrics"] == "test.accuracy,test.hr_at_10"
    state = json.loads(
        zlib.decompress(base64.b64decode(tags["mlflow.sharedViewState.narrowcast"].removeprefix("deflate;")))
    )
    charts = {(chart["metricKey"], chart["selectedXAxisMetricKey"]) for chart in state["compareRunCharts"]}
    axes = ("", "total_uplink_bits", "total_bits", "simulated_seconds")
    assert {(metric, axis) for metric in ("test.accuracy", "test.hr_at_10") for axis in axes} <= charts
