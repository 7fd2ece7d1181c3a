"""A real MLflow server that is killed during a run: the run continues, no metric is lost, no password is shown."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from mlflow_server import MlflowServer
from narrowcast.platform.config.run_fields import StoreAddress
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.tracking import sender
from narrowcast.platform.tracking.cursor import Cursor
from narrowcast.runs import session
from narrowcast.runs.prepared import prepare, prepare_resume
from narrowcast.runs.session import OnRound, sync_run
from sampling import sampled
from tracked_run import ROUNDS, TrackedRun, assert_each_round_is_there_once, load, nothing, run_tracked

pytestmark = pytest.mark.slow

SECRET = "s3cr3t"


@pytest.fixture(scope="module")
def once_started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path_factory.mktemp("server"))
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def server(once_started: MlflowServer) -> MlflowServer:
    once_started.start()
    return once_started


def at(actions: Mapping[int, Callable[[], None]]) -> OnRound:
    """Call a function once a round is recorded, before the next one starts."""

    def progress(row: Mapping[str, Any]) -> None:
        actions.get(row["round"], lambda: None)()

    return progress


@pytest.mark.usefixtures("drawn")
def test_a_store_that_dies_costs_the_run_nothing(
    server: MlflowServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    experiment = load(f"tracking.uri={server.uri}", "tracking.system_metrics=true")
    prepared = prepare(experiment, tmp_path)
    result = session.run(prepared, at({4: server.kill}))
    played = TrackedRun(experiment, prepared.folder, result, MlflowClient(server.uri))
    assert [row["round"] for row in played.rounds] == list(range(1, ROUNDS + 1))
    assert (prepared.folder / "result.json").is_file()
    kept = Cursor.load(prepared.folder)
    assert kept.sent_rounds <= 4
    assert not kept.closed
    warnings = [record.getMessage() for record in caplog.records]
    assert sum("the MLflow store is down" in line for line in warnings) == 1
    assert warnings[-1] == f"not all of this run is in MLflow yet: narrowcast sync {prepared.folder}"

    with pytest.raises(UserError, match=f"no MLflow store answers at {server.uri} .*start it"):
        sync_run(prepared.folder, None)
    server.start()
    assert played.run.info.status == "RUNNING"
    assert sync_run(prepared.folder, None) == ROUNDS - kept.sent_rounds
    assert_each_round_is_there_once(played)
    assert played.run.info.status == "FINISHED"
    assert played.run.data.tags["model_sha256"] == result["model_sha256"]
    names = {entry.path for entry in played.client.list_artifacts(played.run.info.run_id)}
    files = {"clients.parquet", "config.yaml", "model.safetensors", "result.json", "rounds.parquet"}
    assert names == files | {"checkpoint", "partition", "plots"}
    assert sync_run(prepared.folder, None) == 0
    assert_each_round_is_there_once(played)


@pytest.mark.parametrize("back_after", sampled([6, ROUNDS], [ROUNDS]))
def test_a_store_that_comes_back_in_time_has_everything_at_the_end(
    server: MlflowServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    back_after: int,
) -> None:
    monkeypatch.setattr(sender, "_RETRY_SECONDS", 60.0)  # only a new round, or the end, makes it try again
    experiment = load(f"tracking.uri={server.uri}", "tracking.system_metrics=false")
    prepared = prepare(experiment, tmp_path)
    result = session.run(prepared, at({3: server.kill, back_after: server.start}))
    played = TrackedRun(experiment, prepared.folder, result, MlflowClient(server.uri))
    assert_each_round_is_there_once(played)
    assert played.run.info.status == "FINISHED"
    assert Cursor.load(prepared.folder).closed
    warnings = [record.getMessage() for record in caplog.records]
    assert "the MLflow store is down" in warnings[0]
    assert warnings[1:] == ["the MLflow store answers again"]


def test_the_machines_load_is_logged_again_once_the_store_is_back(
    server: MlflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    monkeypatch.setattr(sender, "_RETRY_SECONDS", 0.2)
    played = run_tracked(tmp_path, load(f"tracking.uri={server.uri}", "tracking.system_metrics=false"))
    run_id = played.run.info.run_id
    played.client.update_run(run_id, status="RUNNING")
    stop = sender.monitor_system(StoreAddress(server.uri), run_id, enabled=True, resume=False)

    def samples(least: int) -> int:
        deadline = time.monotonic() + 60
        while len(found := played.history("system/cpu_utilization_percentage")) < least:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        return len(found)

    try:
        samples(1)
        server.kill()
        time.sleep(1.0)
        server.start()
        samples(samples(1) + 2)
    finally:
        stop()


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
def test_an_interrupted_run_that_is_sent_later_is_killed_and_not_failed(tmp_path: Path) -> None:
    played = run_tracked(tmp_path, load("tracking.system_metrics=false"))
    (played.folder / "result.json").unlink()
    for status in ("KILLED", "FAILED"):
        Cursor(Cursor.load(played.folder).uri, played.run.info.run_id, status=status).save(played.folder)
        assert sync_run(played.folder, None) == ROUNDS
        assert played.run.info.status == status


def test_a_sync_that_a_dying_store_cuts_short_can_be_repeated(server: MlflowServer, tmp_path: Path) -> None:
    """The store gets the first rounds twice, since the position is lost as in a crash of the machine."""
    played = run_tracked(tmp_path, load(f"tracking.uri={server.uri}", "tracking.system_metrics=false"))
    Cursor(server.uri, played.run.info.run_id, sent_rounds=2).save(played.folder)
    assert sync_run(played.folder, None) == ROUNDS - 2
    assert_each_round_is_there_once(played)


def test_the_stores_password_is_kept_nowhere(
    server: MlflowServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="narrowcast")
    uri = server.uri.replace("://", f"://alice:{SECRET}@")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    run_tracked(tmp_path, load("tracking.system_metrics=false"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    whole = load(f"tracking.uri={uri}", "tracking.system_metrics=true")
    played = run_tracked(tmp_path, whole)
    assert_each_round_is_there_once(played)

    messages = []
    with pytest.raises(UserError, match=r"password of the MLflow store http://\*\*\*@.* tracking.uri=") as asked:
        prepare_resume(played.folder, None)
    messages.append(str(asked.value))
    with pytest.raises(UserError, match=r"http://\*\*\*@.*, whose password is not kept; .* --tracking-uri") as asked:
        sync_run(played.folder, None)
    messages.append(str(asked.value))
    assert sync_run(played.folder, uri) == 0
    again = prepare_resume(played.folder, whole)
    assert session.run(again, nothing)["model_sha256"] == played.result["model_sha256"]

    # The store goes away: before a run, in a run that fails, and for good.
    lost = prepare(whole, tmp_path)
    ready = prepare(whole, tmp_path / "other")

    def fail() -> None:
        server.kill()
        raise RunFailed("for this test")

    with pytest.raises(RunFailed, match="for this test"):
        session.run(lost, at({4: fail}))
    for attempt in (
        lambda: prepare(whole, tmp_path),
        lambda: sync_run(lost.folder, uri),
        lambda: session.run(ready, nothing),
    ):
        with pytest.raises(UserError, match=r"http://\*\*\*@127\.0\.0\.1") as refused:
            attempt()
        messages.append(str(refused.value))
    assert not ready.folder.exists()
    assert "narrowcast sync" in caplog.text
    printed = capfd.readouterr()
    for shown in (*messages, caplog.text, printed.out, printed.err):
        assert SECRET not in shown
    files = [path for root in (tmp_path, server.folder) for path in root.rglob("*") if path.is_file()]
    assert {"config.yaml", "tracking.json", "mlflow.db"} <= {path.name for path in files}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


class _Refusing(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(401)

    def log_message(self, *_: object) -> None:
        pass


class _Agreeing(_Refusing):
    """Answers every request with an empty object, as another program on the port may."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        self.do_GET()


def test_a_server_that_is_none_of_mlflows_is_no_store(tmp_path: Path) -> None:
    with answering(_Agreeing) as address, pytest.raises(UserError, match=r"no MLflow store answers at .*'{}'"):
        prepare(load(f"tracking.uri=http://{address}"), tmp_path)


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_store_that_refuses_is_said_without_its_password(tmp_path: Path) -> None:
    with answering(_Refusing) as address, pytest.raises(UserError, match="401 Client Error") as refused:
        prepare(load(f"tracking.uri=http://alice:{SECRET}@{address}"), tmp_path)
    assert SECRET not in str(refused.value)
    assert "***" in str(refused.value)
