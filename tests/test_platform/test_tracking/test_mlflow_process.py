"""The second process of a run: its calls, its end with the run's, and a run whose second process is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from narrowcast.platform.config.run_fields import StoreAddress
from narrowcast.platform.errors import StoreError, UserError
from narrowcast.platform.storage.journal import Journal
from narrowcast.platform.tracking import second_process as module
from narrowcast.platform.tracking.cursor import Cursor
from narrowcast.platform.tracking.second_process import (
    SecondProcess,
    begin,
    call,
    mlflow_store,
    run_figures,
    second_process,
)

TOKEN = "t0k3n-of-a-test"


@pytest.fixture(scope="module")
def started() -> Iterator[SecondProcess]:
    process = SecondProcess()
    try:
        yield process
    finally:
        process.close()
        assert process._process.returncode is not None


@pytest.fixture
def process(started: SecondProcess) -> Iterator[SecondProcess]:
    token = module._current.set(started)
    try:
        yield started
    finally:
        module._current.reset(token)


class _Store(BaseHTTPRequestHandler):
    """As much of an MLflow server as a check asks for; it keeps the header that has the token."""

    authorised: list[str | None] = []  # noqa: RUF012 - of the one server of a test

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self._answer(b"3.0.0")

    def do_POST(self) -> None:
        self.authorised.append(self.headers["Authorization"])
        self._answer(json.dumps({"experiments": []}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
def test_calls_outlive_signals_and_raise_what_they_would_here(process: SecondProcess, tmp_path: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process._process.send_signal(number) if _listens(process, number) else pytest.fail(f"{number} ends it")
    assert call(mlflow_store.metric_name, "hr@10") == "hr_at_10"
    with pytest.raises(UserError, match="no MLflow store answers at nonsense://"):
        call(mlflow_store.check_store, StoreAddress("nonsense://store"))
    with pytest.raises(FileNotFoundError):
        call(run_figures.figures_of_files, {"rounds.parquet": tmp_path / "none"}, "a run")
    with pytest.raises(RuntimeError, match="InvalidVersion: Invalid version: 'none'"):
        call(mlflow_store.Version, "none")


def _listens(process: SecondProcess, number: int) -> bool:
    """Wait until the process ignores a signal."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        status = Path(f"/proc/{process._process.pid}/status").read_text()
        if int(status.partition("SigIgn:")[2].split()[0], 16) >> (number - 1) & 1:
            return True
        time.sleep(0.02)
    return False


def test_a_token_set_meanwhile_reaches_the_store_and_no_command_line(
    process: SecondProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HTTPServer(("127.0.0.1", 0), _Store) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            for value in (TOKEN, None):
                if value:
                    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", value)
                else:
                    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN")
                call(mlflow_store.check_store, StoreAddress(f"http://127.0.0.1:{server.server_port}", "user"))
        finally:
            server.shutdown()
            thread.join()
    assert _Store.authorised == [f"Bearer {TOKEN}", None]
    assert TOKEN not in " ".join(psutil.Process(process._process.pid).cmdline())


def test_what_a_killed_process_has_not_answered_is_called_here(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = SecondProcess()
    monkeypatch.setattr(module, "_current", _Holder(process))
    begun = begin(mlflow_store.metric_name, "hr@10")
    process._process.kill()
    assert begun() == "hr_at_10"
    assert call(mlflow_store.metric_name, "ndcg@5") == "ndcg_at_5"
    process.close()
    assert "the second process was killed" in caplog.text
    with pytest.raises(StoreError, match="no answer before the end of the run"):  # a thread may still be at it
        call(mlflow_store.metric_name, "hr@10")


@pytest.mark.usefixtures("process")
def test_an_answer_that_cannot_be_sent_keeps_nobody_waiting() -> None:
    with pytest.raises(RuntimeError, match=r"no answer of ScopedSettings .*cannot pickle"):  # it has a lock
        call(mlflow_store.ScopedSettings, {})
    assert call(mlflow_store.metric_name, "hr@10") == "hr_at_10"


@pytest.mark.slow
def test_a_second_process_that_answers_nonsense_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    process = SecondProcess()
    monkeypatch.setattr(module, "_current", _Holder(process))
    begun = begin(mlflow_store.metric_name, "hr@10")
    process._waiting[10**6] = process._waiting.pop(next(iter(process._waiting)))  # its answer is to no question
    assert begun() == "hr_at_10"
    process.close()


def test_where_no_process_can_be_started_calls_are_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.delitem(sys.modules, "mlflow")
    with second_process():
        assert call(mlflow_store.metric_name, "hr@10") == "hr_at_10"


class _Holder:
    def __init__(self, process: SecondProcess) -> None:
        self.process = process

    def get(self) -> SecondProcess:
        return self.process


@pytest.mark.slow
def test_it_ends_with_a_process_that_is_killed() -> None:
    program = (
        "from narrowcast.platform.tracking.second_process import SecondProcess; import time; "
        "print(SecondProcess()._process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        second = psutil.Process(int(first.stdout.readline()))
        first.kill()
    with suppress(psutil.NoSuchProcess):
        second.wait(60)
    assert not second.is_running()


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
def test_a_run_whose_second_process_is_killed_is_all_there(tmp_path: Path) -> None:
    words = ("run", "fedavg-digits", "name=run", "rounds=400", "backend=local", "--output", tmp_path)
    command = [sys.executable, "-m", "narrowcast", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        journal, deadline = tmp_path / "run" / "journal.jsonl", time.monotonic() + 120
        while not (journal.exists() and journal.read_bytes().count(b"\n") > 3) and time.monotonic() < deadline:
            time.sleep(0.02)
        (second,) = [each for each in psutil.Process(run.pid).children() if each.pid == os.getsid(each.pid)]
        second.kill()
        out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    assert err.count("the second process was killed") == 1
    assert "accuracy" in out
    cursor = Cursor.load(tmp_path / "run")
    assert cursor.closed
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    stored = client.get_metric_history(cursor.run_id, "loss")
    rows = Journal.open(tmp_path / "run").rounds
    assert sorted((each.step, each.value) for each in stored) == [(row["round"], row["loss"]) for row in rows]
    assert client.get_run(cursor.run_id).info.status == "FINISHED"
    assert (tmp_path / "run" / "plots" / "loss_time.png").stat().st_size > 10_000
