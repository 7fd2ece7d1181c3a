"""Studies whose process, worker or database is killed: nothing is lost and nothing counts twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from postgres import Postgres
from test_tuning.studies import EXPERIMENT, RATES, nested_runs, trials, write_study

pytestmark = [pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"), pytest.mark.slow]
ON_RAY = (
    "study: {objectives: {validation.accuracy: maximize}, trials: 8, parallel: 2, cpus_per_worker: 0.5, "
    "retest: {trials: 0}}\n"
)
LONG = ("experiment.rounds=300", "experiment.evaluate_every=20")


@contextmanager
def tuning(*words: object) -> Iterator[subprocess.Popen[str]]:
    """A study in a process group of its own, gone at the end with all that it started."""
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


def wait_until(true: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ended(folder: Path) -> int:
    return len(list((folder / "trials").glob("*/result.json")))


def check_whole(rows: list[dict[str, str]], output: Path, n_trials: int, lost: int) -> None:
    """So many trials count, each lost one was tried again with its values, and MLflow says the same."""
    assert [row["state"] for row in rows].count("complete") == n_trials
    assert [row["state"] for row in rows].count("lost") == lost == len(rows) - n_trials
    by_number = {row["trial"]: row for row in rows}
    retried = [row["retry_of"] for row in rows if row["retry_of"]]
    assert sorted(retried) == sorted(row["trial"] for row in rows if row["state"] == "lost")
    for row in rows:
        if row["retry_of"]:
            for path in ("training.learning_rate", "training.batch_size"):
                assert row[path] == by_number[row["retry_of"]][path] != ""
    _, nested = nested_runs(output)
    assert {number: run.data.tags["state"] for number, run in nested.items()} == {
        row["trial"]: row["state"] for row in rows
    }
    for number, run in nested.items():
        if run.data.tags["state"] == "complete":
            assert run.data.metrics["validation.accuracy"] == float(by_number[number]["validation.accuracy"])


@pytest.mark.ray
def test_killed_worker_and_killed_study(tmp_path: Path) -> None:
    words = (write_study(tmp_path, EXPERIMENT + ON_RAY + RATES), "--output", tmp_path, *LONG)
    folder = tmp_path / "digits"
    with tuning(*words) as process:
        wait_until(lambda: ended(folder) >= 1, process)
        hosts = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "_StepHost" in " ".join(child.cmdline())
        ]
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
    rows = trials(folder)
    check_whole(rows, tmp_path, 8, lost=[row["state"] for row in rows].count("lost"))
    assert 1 <= [row["state"] for row in rows].count("lost") <= 3  # the worker's one, and the study's two at most


def test_two_processes_on_postgresql_that_goes_away(tmp_path: Path) -> None:
    postgres = Postgres()
    try:
        postgres.start()
        local = ON_RAY.replace("parallel: 2", "executor: local").replace("trials: 8", "trials: 16")
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
        check_whole(trials(last / "digits"), tmp_path, 16, lost=0)
        assert sum(ended(folder / "digits") for folder in folders) == 16
    finally:
        postgres.remove()
