"""Studies whose process, worker, database or MLflow server is killed: no trial is lost or counted twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from child_processes import actor_processes
from mlflow_server import MlflowServer
from postgres import Postgres
from studies import EXPERIMENT, RATES, check_whole, ended, nested_runs, result, write_study

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # on a machine that may do other things
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),
]
ON_RAY = (
    "study: {objectives: {validation.accuracy: maximize}, trials: 6, parallel: 2, cpus_per_worker: 0.5, "
    "holdout: {trials: 0}}\n"
)
LONG = ("experiment.rounds=300", "experiment.evaluate_every=20")


@contextmanager
def tuning(*words: object) -> Iterator[subprocess.Popen[str]]:
    """Start a study in a process group of its own, and end the group."""
    command = [sys.executable, "-m", "narrowcast", "tune", *map(str, words)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        yield process
    finally:
        started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        psutil.wait_procs(started, timeout=30)


def wait_until(true: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.ray
def test_killed_worker_and_killed_study(tmp_path: Path) -> None:
    words = (write_study(tmp_path, EXPERIMENT + ON_RAY + RATES), "--output", tmp_path, *LONG)
    folder = tmp_path / "digits"
    with tuning(*words) as process:
        wait_until(lambda: ended(folder) >= 1, process)
        hosts = actor_processes("_Worker", process.pid)
        assert len(hosts) == 2
        hosts[0].kill()
        wait_until(lambda: ended(folder) >= 3, process)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        gone, left = psutil.wait_procs(children, timeout=10)
        assert {host.pid for host in hosts[1:]} <= {child.pid for child in gone}
        for child in left:  # Ray's agents take minutes to notice
            child.kill()
    with tuning(*words) as process:
        said, _ = process.communicate(timeout=200)
        assert process.returncode == 0, said
    assert 1 <= len(check_whole(folder, tmp_path, 6)) <= 3  # the worker's one, and the study's two at most


def test_two_processes_on_postgresql_that_goes_away(tmp_path: Path) -> None:
    postgres = Postgres()
    try:
        postgres.start()
        local = ON_RAY.replace("parallel: 2", "backend: local").replace("trials: 6", "trials: 16")
        study, folders = write_study(tmp_path, EXPERIMENT + local + RATES), (tmp_path / "one", tmp_path / "two")
        store = f"experiment.tracking.uri=sqlite:///{tmp_path}/mlflow.db"
        one, two = ((study, "--output", folder, *LONG, store, "--storage", postgres.url) for folder in folders)
        with tuning(*one) as first:
            wait_until(lambda: ended(folders[0] / "digits") >= 1, first)
            with tuning(*two) as second:
                wait_until(lambda: ended(folders[1] / "digits") >= 1, second)
                postgres.kill()
                time.sleep(5)
                postgres.start()
                for process in (first, second):
                    said, _ = process.communicate(timeout=250)
                    assert process.returncode == 0, said
                    assert "the study's storage is down" in said
                    assert "answers again" in said
        last = max(folders, key=lambda folder: (folder / "digits" / "trials.csv").stat().st_mtime)
        assert check_whole(last / "digits", tmp_path, 16) == []
        assert sum(ended(folder / "digits") for folder in folders) == 16
    finally:
        postgres.remove()


def test_four_processes_end_one_study_at_once(tmp_path: Path) -> None:
    local = ON_RAY.replace("parallel: 2", "backend: local").replace("{trials: 0}", "{trials: 1, seeds: 1}")
    words = (write_study(tmp_path, EXPERIMENT + local.replace("trials: 6", "trials: 8") + RATES), "--output", tmp_path)
    folder = tmp_path / "digits"
    with ExitStack() as stack:
        processes = [stack.enter_context(tuning(*words)) for _ in range(4)]
        said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said
    assert check_whole(folder, tmp_path, 8) == []
    assert result(folder)["trials"] == {"complete": 8}
    assert len(list((folder / "holdout").iterdir())) == 1
    assert {path.name for path in (folder / "plots").iterdir()} == {
        "history.png", "importance.png", "parallel.png", "study.html",
    }  # fmt: skip
    parent, _ = nested_runs(tmp_path)
    assert (parent.info.status, parent.data.metrics["trials_complete"]) == ("FINISHED", 8)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    for name in parent.data.metrics:
        assert [each.step for each in client.get_metric_history(parent.info.run_id, name)] == [8]


def test_an_mlflow_server_that_goes_away_misses_nothing(tmp_path: Path) -> None:
    server = MlflowServer(tmp_path)
    local = ON_RAY.replace("parallel: 2", "backend: local").replace("trials: 6", "trials: 4")
    study, folder = write_study(tmp_path, EXPERIMENT + local + RATES), tmp_path / "digits"
    where = (f"experiment.tracking.uri={server.uri}", "experiment.tracking.flush_seconds=200")
    try:
        server.start()
        with tuning(study, "--output", tmp_path, *LONG, *where) as process:
            wait_until(lambda: ended(folder) >= 1, process)
            server.kill()
            wait_until(lambda: ended(folder) == 4, process)
            server.start()
            said, _ = process.communicate(timeout=200)
        assert process.returncode == 0, said
        assert "the MLflow store is down" in said
        assert "the MLflow store answers again" in said
    finally:
        server.kill()
    assert check_whole(folder, tmp_path, 4) == []
    parent, nested = nested_runs(tmp_path)
    assert parent.info.status == "FINISHED"
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    assert len(list((tmp_path / "artifacts").rglob("plots/study.html"))) == 1
    for number, run in nested.items():
        rows = (folder / "trials" / f"{int(number):05d}" / "rounds.jsonl").read_text().splitlines()
        wanted = [(row["round"], row["validation.accuracy"]) for row in map(json.loads, rows)]
        sent = client.get_metric_history(run.info.run_id, "validation.accuracy")
        assert sorted((metric.step, metric.value) for metric in sent) == wanted
