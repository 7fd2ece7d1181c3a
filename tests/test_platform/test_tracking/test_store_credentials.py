"""Credentials of the environment go to the host that it names, to another by the user's word, and to no third."""

from __future__ import annotations

import base64
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from mlflow.tracking._tracking_service import utils

from command_line import Said, assert_refused, narrowcast
from mlflow_server import MlflowServer
from narrowcast.platform.config.run_fields import StoreAddress, Tracking, host_of
from narrowcast.platform.errors import StoreError, UserError, warn_once
from narrowcast.platform.tracking.store import send_rounds
from narrowcast.platform.tracking.study_sender import StudyStore
from recording_host import RecordingHost, recording_host

# MLflow's SQL store uses what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")

ALICE = "Basic " + base64.b64encode(b"alice:own-password").decode()
BEARER = "Bearer own-token"
RUN = ("--backend", "local", "rounds=2", "data.clients=20", "tracking.system_metrics=true")


@pytest.fixture(autouse=True)
def _of_alice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give the environment a user and a password, and no address."""
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "alice")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "own-password")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    warn_once.cache_clear()
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def hosts() -> Iterator[tuple[RecordingHost, RecordingHost]]:
    """Yield the host of the environment and a stranger's, which answer no more than their version."""
    with recording_host() as own, recording_host() as stranger:
        yield own, stranger


def folder_tracked_at(uri: str, output: Path, credentials: str = "null") -> Path:
    """Return the folder of a run that was stopped after its first round, tracked at an address."""
    folder = output / "theirs"
    folder.mkdir(parents=True)
    (folder / "tracking.json").write_text(json.dumps({"uri": uri, "run_id": "0" * 32}))
    config = {"tracking": {"uri": uri, "credentials": json.loads(credentials)}, "rounds": 3}
    (folder / "config.yaml").write_text(json.dumps(config))
    row = {"round": 1, "loss": 0.5, "logged_at_ms": 1000}
    (folder / "journal.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def study(uri: str) -> str:
    """Write a study whose runs name an address."""
    values = {
        "experiment": {"base": "fedavg-digits", "rounds": 2, "data": {"clients": 20}, "tracking": {"uri": uri}},
        "study": {"objectives": {"validation.accuracy": "maximize"}, "trials": 1},
        "space": {"training.learning_rate": [0.1, 0.2]},
    }
    Path("study.yaml").write_text(json.dumps(values))
    return "study.yaml"


def benchmark(uri: str) -> str:
    """Write a benchmark whose solves name an address."""
    values = {
        "problems": {"a": {"kind": "synthetic_completion", "rows": 20, "columns": 20, "rank": 1}},
        "solvers": {"asd": "asd"},
        "solve": {"tracking": {"uri": uri}},
    }
    Path("benchmark.yaml").write_text(json.dumps(values))
    return "benchmark.yaml"


def command(name: str, uri: str) -> Said:
    """Let a command meet an address that its file or folder names."""
    match name:
        case "run":
            Path("mine.yaml").write_text(
                json.dumps({"data": "digits", "algorithm": "fedavg", "tracking": {"uri": uri}})
            )
            return narrowcast("run", "mine.yaml", *RUN[:2])
        case "tune":
            return narrowcast("tune", study(uri))
        case "benchmark":
            return narrowcast("benchmark", benchmark(uri))
        case _:
            return narrowcast("sync", folder_tracked_at(uri, Path("runs")))


@pytest.mark.parametrize("name", ["run", "tune", "benchmark", "sync"])
@pytest.mark.parametrize("names", ["another host", "no host"])
@pytest.mark.parametrize("scheme", [ALICE, BEARER])
def test_a_host_that_a_file_names_gets_no_credentials(
    name: str, names: str, scheme: str, hosts: tuple[RecordingHost, RecordingHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, stranger = hosts
    if scheme is BEARER:
        monkeypatch.delenv("MLFLOW_TRACKING_USERNAME")
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "own-token")
    if names == "another host" and name != "sync":  # which goes to that of the environment
        monkeypatch.setenv("MLFLOW_TRACKING_URI", own.uri)
    said = command(name, stranger.uri)
    assert said.status == 2
    assert len(stranger.requests) >= 2, "it was asked for its version and its experiments"
    assert stranger.credentials() == set()
    assert own.requests == []
    withheld = [line for line in said.err.splitlines() if "credentials" in line]
    what = "--tracking-uri" if name == "sync" else "tracking.credentials=environment"
    assert len(withheld) == 1, said.err
    assert f"not sent to {stranger.uri}" in withheld[0]
    assert what in withheld[0]


@pytest.mark.parametrize("name", ["run", "tune", "benchmark", "sync"])
@pytest.mark.parametrize("scheme", [ALICE, BEARER])
def test_the_host_of_the_environment_gets_them(
    name: str, scheme: str, hosts: tuple[RecordingHost, RecordingHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, stranger = hosts
    if scheme is BEARER:
        monkeypatch.delenv("MLFLOW_TRACKING_USERNAME")
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "own-token")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own.uri)
    said = command(name, stranger.uri if name == "sync" else f"{own.uri}/")
    assert said.status == 2, "it refuses all runs"
    assert (own.credentials(), stranger.requests) == ({scheme}, [])
    assert "credentials" not in said.err


def test_a_file_says_that_its_host_gets_them(hosts: tuple[RecordingHost, RecordingHost]) -> None:
    _, other = hosts
    said = narrowcast("run", "fedavg-digits", *RUN, f"tracking.uri={other.uri}", "tracking.credentials=environment")
    assert said.status == 2
    assert other.credentials() == {ALICE}
    assert_refused(narrowcast("run", "fedavg-digits", *RUN, "tracking.credentials=yes"), "tracking.credentials")


def test_a_folder_does_not_say_so_unless_the_user_trusts_it(
    hosts: tuple[RecordingHost, RecordingHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, other = hosts
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    folder = folder_tracked_at(other.uri, tmp_path / "runs", '"environment"')
    narrowcast("sync", folder)
    assert other.credentials() == set()
    narrowcast("sync", folder, "--tracking-uri", other.uri)
    assert other.credentials() == {ALICE}
    other.requests.clear()
    assert narrowcast("trust", folder).status == 0
    narrowcast("sync", folder)
    assert other.credentials() == {ALICE}


def test_the_file_of_credentials_is_of_the_environment_too(
    hosts: tuple[RecordingHost, RecordingHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, stranger = hosts
    for name in ("USERNAME", "PASSWORD"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}")
    kept = tmp_path / "home" / ".mlflow" / "credentials"
    kept.parent.mkdir(parents=True)
    kept.write_text("[mlflow]\nmlflow_tracking_username = alice\nmlflow_tracking_password = own-password\n")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own.uri)
    assert "not sent to" in command("run", stranger.uri).err
    narrowcast("run", "fedavg-digits", *RUN)
    assert (own.credentials(), stranger.credentials()) == ({ALICE}, set())


def test_a_redirect_to_another_host_brings_none(
    hosts: tuple[RecordingHost, RecordingHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, stranger = hosts
    own.moved_to = stranger.uri.replace("127.0.0.1", "localhost")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own.uri)
    assert narrowcast("run", "fedavg-digits", *RUN).status == 2
    assert own.credentials() == {ALICE}
    assert stranger.requests
    assert stranger.credentials() == set()


@pytest.mark.slow
def test_the_second_process_of_a_run_withholds_them_too(
    hosts: tuple[RecordingHost, RecordingHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, stranger = hosts
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own.uri)
    for address in (stranger.uri, own.uri):
        words = [sys.executable, "-m", "narrowcast", "run", "fedavg-digits", *RUN, f"tracking.uri={address}"]
        assert subprocess.run(words, capture_output=True, check=False).returncode == 2
    assert (own.credentials(), stranger.credentials()) == ({ALICE}, set())


def test_of_a_job_the_folder_has_the_password_for_the_own_host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowcast.runs.submission import prepare

    def packed(*overrides: str) -> dict[str, str]:
        return dict(prepare("fedavg-digits", overrides, name=None, output="/runs").values["tracking"])

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://own.example.org")
    of_own, of_stranger = packed(), packed("tracking.uri=https://else.example.org")
    assert (of_own["uri"], of_own["credentials"]) == ("https://alice:own-password@own.example.org", "environment")
    assert (of_stranger["uri"], of_stranger["credentials"]) == ("https://else.example.org", None)
    allowed = packed("tracking.uri=https://else.example.org", "tracking.credentials=environment")
    assert allowed["uri"] == "https://alice:own-password@else.example.org"


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://own", ("http", "own", 80)),
        ("HTTPS://Own/x", ("https", "own", 443)),
        ("https://own:443", ("https", "own", 443)),
        ("http://user:word@own:8080/x", ("http", "own", 8080)),
        ("http://own@evil", ("http", "evil", 80)),
        ("http://own#@evil", ("http", "own", 80)),
        ("http://own\\@evil", ("http", "own", 80)),
        ("http://[::1]:5000", ("http", "[::1]", 5000)),
        ("http:", None),
        ("http://own:port", None),
        ("sqlite:///mlflow.db", None),
        ("databricks", None),
    ],
)
def test_a_host_is_that_which_is_connected_to(url: str, host: tuple[str, str, int] | None) -> None:
    assert host_of(url) == host


@pytest.mark.parametrize(
    ("uri", "own", "gets"),
    [
        ("http://own", "http://own:80/path", True),
        ("http://own", "https://own", False),
        ("http://own:5000", "http://own:5001", False),
        ("http://own", "http://own.evil.org", False),
        ("http://own", "http://sub.own", False),
        ("http://127.0.0.1:5000", "http://localhost:5000", False),
    ],
)
def test_scheme_host_and_port_have_to_agree(uri: str, own: str, gets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own)
    store = Tracking(uri=uri).resolve(Path())
    assert store.gets_credentials(uri) is gets
    assert (store.named_by == "user") is gets


@pytest.mark.parametrize("named_by", ["file", "folder"])
def test_a_store_of_others_does_not_send_the_users_word_to_the_users_host(
    named_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store names where files go: it could have those of a run written over others of the user's own store."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://own")
    store = StoreAddress("http://evil", "file" if named_by == "file" else "folder")
    assert not store.gets_credentials("http://own/api/2.0/mlflow-artifacts/artifacts/1/2")
    assert StoreAddress("http://own", "user").gets_credentials("http://own/api/2.0/mlflow-artifacts/artifacts/1/2")


def test_threads_of_mlflow_send_none_since_there_are_none(
    hosts: tuple[RecordingHost, RecordingHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, stranger = hosts
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own.uri)
    monkeypatch.setenv("MLFLOW_ENABLE_ASYNC_LOGGING", "true")
    for host in hosts:
        with pytest.raises(StoreError):  # which a call that returned before it was answered would not
            send_rounds(
                Tracking(uri=host.uri).resolve(Path()), "0" * 32, [{"round": 1, "loss": 0.5, "logged_at_ms": 1}]
            )
    assert (own.credentials(), stranger.credentials()) == ({ALICE}, set())
    assert os.environ["MLFLOW_ENABLE_ASYNC_LOGGING"] == "true"


def test_the_runs_of_a_studys_trials_send_none(
    hosts: tuple[RecordingHost, RecordingHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, stranger = hosts
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own.uri)
    for host in hosts:
        store = StudyStore(Tracking(uri=host.uri).resolve(Path()), "0" * 32)
        with pytest.raises(UserError, match="cannot continue run"):
            store.open(Path())
        assert not store.finish("FAILED", {"seconds": 1.0}, 1, {}, "", [])
    assert len(stranger.requests) == len(own.requests) >= 2
    assert (own.credentials(), stranger.credentials()) == ({ALICE}, set())


@pytest.mark.parametrize(
    ("place", "may"),
    [
        ("mlflow-artifacts:/1/2/artifacts", True),
        ("mlflow-artifacts://store:5000/1", True),
        ("mlflow-artifacts://internal/1", False),
        ("http://store:5000/api/x", True),
        ("http://internal/x", False),
        ("s3://bucket/1", False),
        ("/home/alice/.ssh", False),
        ("file:///home/alice/.ssh", False),
        ("FILE:///home/alice/.ssh", False),
        ("./mlruns", False),
        ("sftp://host/x", False),
    ],
)
def test_the_store_of_a_folder_keeps_files_itself(place: str, may: bool) -> None:
    assert StoreAddress("http://store:5000", "folder").may_keep_files_at(place) is may
    assert StoreAddress("http://store:5000", "user").may_keep_files_at(place)


@pytest.mark.slow
def test_files_of_a_folder_do_not_go_where_its_own_database_says(tmp_path: Path) -> None:
    output, target = tmp_path / "theirs", tmp_path / "home" / "autostart"
    run = ("run", "fedavg-digits", *RUN[:-1], "name=a", "tracking.system_metrics=false", "--output")
    assert narrowcast(*run, output).status == 0
    with closing(sqlite3.connect(output / "mlflow.db")) as store, store:
        store.execute("UPDATE runs SET artifact_uri = ?", (target.as_uri(),))
    utils._artifact_repos_cache.clear()
    (output / "a" / "authorized_keys").write_text("ssh-ed25519 theirs")
    assert_refused(narrowcast("sync", output / "a"), f"would keep the files of the run at {target.as_uri()}")
    assert not target.exists()
    for escape in ("?/../../home/autostart", "%3F/../../home/autostart"):
        with closing(sqlite3.connect(output / "mlflow.db")) as store, store:
            store.execute("UPDATE runs SET artifact_uri = ?", (f"{output}/mlartifacts{escape}",))
        utils._artifact_repos_cache.clear()
        assert narrowcast("sync", output / "a").status == 2
        assert not target.exists()


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("sqlite:///{home}/x.db", "which is not there"),
        ("sqlite+pysqlite:///{home}/x.db", "is not opened by the word of a folder"),
        ("sqlite:///file:{home}/x.db?uri=true", "is not opened by the word of a folder"),
        ("sqlite:///{home}/../theirs/y.db?uri=true&a=/../../home/x.db", "is not opened by the word of a folder"),
        ("mysql+pymysql://127.0.0.1/x?local_infile=1", "is not opened by the word of a folder"),
        ("mssql+pyodbc:///?odbc_connect=driver%3D{home}/x.so", "is not opened by the word of a folder"),
    ],
)
def test_sync_opens_no_database_where_a_folder_says(
    address: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, theirs = tmp_path / "home", tmp_path / "theirs"
    home.mkdir()
    (theirs / "y.db?a=").mkdir(parents=True)
    monkeypatch.chdir(theirs)
    folder = folder_tracked_at(address.format(home=home), theirs)
    assert_refused(narrowcast("sync", folder), why, "--tracking-uri")
    assert list(home.iterdir()) == []


@pytest.mark.slow
def test_a_whole_run_on_a_store_of_its_file_sends_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics, params, the load of the machine, tags, the view and artifacts: a request of each kind is looked at."""
    server = MlflowServer(tmp_path)
    try:
        server.start()
        with recording_host(server.uri) as own, recording_host(server.uri) as stranger:
            monkeypatch.setenv("MLFLOW_TRACKING_URI", own.uri)
            for uri in (stranger.uri, own.uri):
                said = narrowcast("run", "fedavg-digits", *RUN, f"tracking.uri={uri}")
                assert said.status == 0, said.err
            methods = [{method for method, *_ in host.requests} for host in (own, stranger)]
            assert methods[0] == methods[1] >= {"GET", "POST", "PUT"}
            paths = " ".join(path for _, path, *_ in stranger.requests)
            assert all(each in paths for each in ("runs/create", "log-batch", "mlflow-artifacts", "set-experiment-tag"))
            assert stranger.credentials() == set()
            assert own.credentials() == {ALICE}
            assert [path for _, path, given, _ in own.requests if given is None] == ["/version"]
            monkeypatch.delenv("MLFLOW_TRACKING_URI")
            folder = next(each.parent for each in Path("runs").glob("*/result.json"))
            (tmp_path / "key").write_text("a-secret-key-of-the-user")
            (folder / "notes.txt").symlink_to(tmp_path / "key")
            before = len(stranger.requests)
            kept = json.loads((folder / "tracking.json").read_text())
            (folder / "tracking.json").write_text(json.dumps({**kept, "uri": stranger.uri, "sent_rounds": 0}))
            said = narrowcast("sync", folder)
            assert said.status == 0, said.err
            assert len(stranger.requests) > before + 5
            assert stranger.credentials() == set()
            assert f"{folder / 'notes.txt'} is a link to" in said.err
            assert b"fedavg" in stranger.bodies()
            assert b"a-secret-key-of-the-user" not in stranger.bodies()
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.thorough  # test_planted_secrets.py has a study on such a store
def test_a_whole_study_on_a_store_of_its_file_sends_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own run, those of its trials, its plots and its view."""
    server = MlflowServer(tmp_path)
    try:
        server.start()
        with recording_host(server.uri) as own, recording_host(server.uri) as stranger:
            monkeypatch.setenv("MLFLOW_TRACKING_URI", own.uri)
            for host in (stranger, own):
                said = narrowcast("tune", study(host.uri), "--output", host.uri.rpartition(":")[2])
                assert said.status == 0, said.err
                paths = " ".join(path for _, path, *_ in host.requests)
                assert all(each in paths for each in ("runs/create", "runs/search", "log-batch", "mlflow-artifacts"))
            assert (own.credentials(), stranger.credentials()) == ({ALICE}, set())
    finally:
        server.kill()
