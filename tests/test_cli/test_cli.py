"""Bad input on the command line: one line that says what was got and what to do, and nothing half-written."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
import requests

from command_line import TINY, assert_refused, narrowcast, run_folders, terminated_after
from narrowcast.cli.main import cli
from narrowcast.platform.config.run_fields import StoreAddress
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.tracking import store
from sampling import sampled

# MLflow's queries make SQLAlchemy warn.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
ANSWER_SECONDS = 15.0


class Broken(BaseHTTPRequestHandler):
    """Answers everything with status 500."""

    def do_GET(self) -> None:
        self.send_error(500)

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


@pytest.fixture
def broken_server() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Broken) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.fixture
def silent_server() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder with a finished run `done`, and `cut`, which a SIGTERM ended after a few of its rounds."""
    output = tmp_path_factory.mktemp("runs")
    assert narrowcast("run", *TINY, "--output", output, "name=done").status == 0
    with terminated_after(2, output / "cut"):
        said = narrowcast("run", *TINY, "--output", output, "name=cut", "rounds=1000000", "checkpoint_every=1")
    assert_refused(said, f"interrupted; resume with: narrowcast run --resume cut --output {output}", status=1)
    return output


@pytest.mark.parametrize(
    ("words", "phrases"),
    [
        (["algorithm.rnk=3"], ["algorithm.rnk is unknown; known here: ", 'Did you mean "rank"?']),
        (["round=3"], ["round is unknown", 'Did you mean "rounds"?']),
        (
            ["algorithm.kind=scolar"],
            [
                'algorithm.kind = "scolar" is unknown; known: fedavg, fedprox, scaffold, fednova, feddyn, qffl, afl, '
                "local, fine_tune, apfl, ditto, partial, per_fedavg, pfedme, "
                "fedmf, fedmavg, sfmf, fedpara, lora, submodel, fedma, fedmd, colr, scolr",
                'Did you mean "scolr"',
            ],
        ),
        (["algorithm.rank=many"], ["algorithm.rank = 'many'", "should be a valid integer"]),
        (["algorithm.rank=65"], ["algorithm.rank = 65 is above model.embedding_dim = 64; use a rank of 1 to 64"]),
        (["clients_per_round=0"], ["clients_per_round = 0: should be greater than or equal to 1"]),
        (["data.min_interactions=5000"], ["no user has 5000 interactions", "lower min_interactions"]),
        (["fleet.tiers=[]"], ["fleet.tiers = []", "at least 1 item"]),
        (["fleet={kind: trace, path: no.csv}"], ["no file no.csv; give the path of a CSV file with the columns"]),
        (["training.learning_rate=.nan"], ["training.learning_rate = nan", "should be greater than 0"]),
        (["training.learning_rate=.inf"], ["training.learning_rate = inf", "should be a finite number"]),
        (["training.learning_rate=-0.5"], ["training.learning_rate = -0.5", "should be greater than 0"]),
        (["data={kind: ncf, path: lists/ml}"], ["lists/ml.train.rating (or ml.train.rating.gz) does not exist; give"]),
        (["name=a b"], ["name = 'a b': should begin with a letter or digit, and have only letters, digits, "]),
        ([f"name={'a' * 300}"], ["name = 'aaa", "should have at most 100 characters"]),
        (["stragglers=partial"], ["stragglers = 'partial': needs a deadline; give deadline_seconds"]),
        (["schedule=buffered", "deadline_seconds=4"], ["schedule = 'buffered': has no rounds; leave out radio"]),
        (["schedule=buffered"], ["schedule = buffered: scolr as set here cannot count stale updates less; use fedavg"]),
        (
            ["targets={test.acc: 1}"],
            ["targets.test.acc is not a metric of this run; it measures test.hr@10, test.ndcg@10"],
        ),
        (["rank"], ['"rank" is not an override; write a.b=value, such as algorithm.rank=8']),
        (["algorithm={kind"], ["override algorithm, line 1, column ", "not valid YAML"]),
        (["--backend", "cloud"], ["'cloud' is not one of 'local', 'ray'"]),
        (["--bogus"], ["No such option '--bogus'"]),
    ],
)
def test_a_bad_setting(tmp_path: Path, words: list[str], phrases: list[str]) -> None:
    assert_refused(narrowcast("run", *TINY, "--output", tmp_path, *words), *phrases)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "phrases"),
    [
        (b"rounds: 2\ndata: {kind: ml-100k\nalgorithm: x\n", ["my.yaml, line 3, column 10: not valid YAML"]),
        (b"\x80\x00\xff" * 50, ["my.yaml: not a text in UTF-8 (byte 0); correct the file"]),
        (b"", ["my.yaml: the file is empty; give a mapping"]),
        (b"- 1\n", ["my.yaml: should be a mapping at the top, with a line KEY: VALUE"]),
        (b"rounds: 2\n", ["my.yaml: data is missing; algorithm is missing"]),
        (None, ['no experiment "', "neither a file nor a packaged experiment; packaged: "]),
    ],
)
def test_a_bad_file(tmp_path: Path, content: bytes | None, phrases: list[str]) -> None:
    path, output = tmp_path / "my.yaml", tmp_path / "runs"
    if content is not None:
        path.write_bytes(content)
    assert_refused(narrowcast("run", path, "--output", output), *phrases)
    assert not output.exists()


@pytest.mark.parametrize(
    ("words", "phrases"),
    [
        (["run"], ["no experiment given; name a packaged one (narrowcast show lists them) or a YAML file"]),
        (["run", "scolr-ml10k"], ['no experiment "scolr-ml10k"', 'Did you mean "scolr-ml100k"?']),
        (["run", "."], [".: cannot be read as an experiment file"]),
        (["run", "--resume", "nope"], ["no run at runs/nope; runs in runs: none"]),
        (["show", "scolr-ml10k"], ['Did you mean "scolr-ml100k"?']),
        (["compare"], ["Missing argument 'RUN...'"]),
        (["compare", "nope"], ["runs/nope: no such folder; give the folder of a run"]),
        (["sync", "nope"], ["runs/nope holds no run that was tracked", "give a run's folder"]),
        (["ui"], ["no runs in runs; start one with narrowcast run, or give another folder with --output"]),
        (["ui", "--port", "0"], ["0 is not in the range 1<=x<=65535"]),
        (["data", "fetch", "ml-10k"], ["unknown data set 'ml-10k'; known: ml-100k, ml-1m, ml-latest-small"]),
        (["fly"], ["No such command 'fly'"]),
    ],
)
def test_a_bad_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], phrases: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(narrowcast(*words), *phrases)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "phrases"),
    [
        (None, ["no ml-100k.inter or u.data in ", "run: narrowcast data fetch ml-100k"]),
        ("user_id:token\titem_id:token\trating:float\ttimestamp:float\n", ["no user has 20 interactions"]),
        ("", ["ml-100k.inter: Empty CSV file; download the file again"]),
    ],
)
def test_a_data_set_that_is_missing_or_has_no_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, phrases: list[str]
) -> None:
    named, home, output = tmp_path / "data", tmp_path / "home", tmp_path / "runs"
    monkeypatch.setenv("NARROWCAST_DATA", str(named))
    monkeypatch.setenv("HOME", str(home))
    if content is None:
        phrases = [*phrases, f"{named}/ml-100k or {home}/.cache/narrowcast/data/ml-100k"]
    else:
        (named / "ml-100k").mkdir(parents=True)
        (named / "ml-100k" / "ml-100k.inter").write_text(content)
    assert_refused(narrowcast("run", *TINY, "--output", output), *phrases)
    assert not output.exists()


@pytest.mark.parametrize("below", ["", "below", "below/that"])
def test_an_output_folder_that_cannot_be_written(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    output = tmp_path / "file" / below
    said = narrowcast("run", *TINY, "--output", output)
    assert_refused(said, f"cannot write to {output} (", "give another folder with --output")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("listener", "phrase"),
    sampled(
        [
            ("closed_port", "Connection refused); start one, or leave out --address"),
            SILENT := ("silent_server", "is not a Ray cluster of this version and token; give the address"),
            ("broken_server", "is not a Ray cluster of this version and token; give the address"),
        ],
        [SILENT],
    ),
)
def test_no_ray_cluster_at_the_address(
    tmp_path: Path, request: pytest.FixtureRequest, listener: str, phrase: str
) -> None:
    address, began = f"127.0.0.1:{request.getfixturevalue(listener)}", time.monotonic()
    said = narrowcast("run", "scolr-ml100k", "--address", address, "--output", tmp_path)
    assert time.monotonic() - began < ANSWER_SECONDS
    assert_refused(said, address, phrase)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("address", ["here", "127.0.0.1", "127.0.0.1:", ":6379", "127.0.0.1:ray"])
def test_a_malformed_ray_address(tmp_path: Path, address: str) -> None:
    said = narrowcast("run", "scolr-ml100k", "--address", address, "--output", tmp_path)
    assert_refused(said, f'backend.address = "{address}" is not a Ray address; give host:port, or auto')
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("listener", "phrase"),
    [("closed_port", "Connection refused"), ("silent_server", "timed out"), ("broken_server", "500 Server Error")],
)
def test_no_tracking_store_at_the_address(
    tmp_path: Path, request: pytest.FixtureRequest, listener: str, phrase: str
) -> None:
    port, began = request.getfixturevalue(listener), time.monotonic()
    said = narrowcast("run", *TINY, "--output", tmp_path, f"tracking.uri=http://me:secret@127.0.0.1:{port}")
    assert time.monotonic() - began < ANSWER_SECONDS
    assert_refused(said, f"no MLflow store answers at http://***@127.0.0.1:{port} (", phrase, "start it, or set")
    assert "secret" not in said.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("uri", "phrase"),
    [
        ("gopher://x/y", "no MLflow store answers at gopher://x/y ("),
        ("http://", "No host supplied"),
        ("http://[::1", "Invalid IPv6 URL"),
        ("word", "no MLflow store answers at word ("),
        ("sqlite://", 'tracking.uri = "sqlite://" names no file; write sqlite:///path/to/mlflow.db'),
        ("sqlite:////", "unable to open database file"),
        ("postgresql+nodriver://me:secret@127.0.0.1:1/x", "no MLflow store answers at postgresql+nodriver://me:***@"),
    ],
)
def test_a_malformed_tracking_uri(tmp_path: Path, uri: str, phrase: str) -> None:
    began = time.monotonic()
    said = narrowcast("run", *TINY, "--output", tmp_path, f'tracking.uri="{uri}"')
    assert time.monotonic() - began < ANSWER_SECONDS
    assert_refused(said, phrase, "sqlite:///path/to/mlflow.db" if uri == "sqlite://" else "set tracking.uri or MLFLOW_")
    assert "secret" not in said.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "phrases"),
    [
        (["run", "--resume", "nope"], ["no run at ", "nope; runs in ", ": cut, done"]),
        (["run", "--resume", "done", "algorithm.rank=4"], ["algorithm.rank was 16, now 4; resume with its own"]),
        (["run", "--resume", "done", "rounds=1"], ["done has finished 2 rounds already and rounds = 1"]),
        (["run", "--resume", "done", "rouns=1"], ["rouns is unknown", 'Did you mean "rounds"']),
        (["run", "fedmf-ml1m", "--resume", "done"], ["algorithm.kind was 'scolr', now 'fedmf'"]),
        (["run", "--resume", "cut", "rounds=1"], ["cut has finished ", " rounds already and rounds = 1"]),
        (["compare", "done", "nope"], ["nope: no such folder"]),
        (["compare", "done", "cut"], ["cut: has no result.json, so it is not a finished run; ", "run --resume cut"]),
        (["compare", "done", "--plot", "x.docx"], ["x.docx: not the name of a figure; end it in one of .", ".png"]),
        (["sync", "mlartifacts"], ["mlartifacts holds no run that was tracked"]),
        (["sync", "done", "--tracking-uri", "http://[::1"], ["no MLflow store answers at http://[::1 ("]),
    ],
)
def test_what_cannot_be_done_with_a_run(runs: Path, words: list[str], phrases: list[str]) -> None:
    before = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file() and path.suffix != ".db"}
    assert_refused(narrowcast(*words, "--output", runs), *phrases)
    after = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file() and path.suffix != ".db"}
    assert after == before
    assert run_folders(runs) == ["cut", "done"]


@pytest.mark.parametrize(
    ("name", "content", "phrases"),
    [
        ("config.yaml", None, ["done has no config.yaml any more; put it back, or start the run again"]),
        ("config.yaml", b"\x80", ["config.yaml: not a text in UTF-8 (byte 0); correct the file"]),
        (
            "config.yaml",
            b"- 1\n",
            ["config.yaml: should be a mapping at the top, with a line KEY: VALUE"],
        ),
        ("config.yaml", b"rounds: [2\n", ["config.yaml, line 2, column 1: not valid YAML"]),
        ("checkpoint/*", None, ["done has finished round 2, but ", "no checkpoint any more", "start the run again"]),
        ("checkpoint/*", b"", [".safetensors is damaged ("]),
    ],
)
def test_a_run_that_was_damaged(
    runs: Path, tmp_path: Path, name: str, content: bytes | None, phrases: list[str]
) -> None:
    folder = tmp_path / "done"
    shutil.copytree(runs / "done", folder)
    for path in list(folder.glob(name)):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
    said = narrowcast("run", "--resume", "done", "--output", tmp_path, f"tracking.uri=sqlite:///{runs}/mlflow.db")
    assert_refused(said, *phrases)


@pytest.mark.parametrize("content", [None, b"[]"])
def test_a_run_without_its_tracking_file_goes_on_in_a_new_mlflow_run(
    runs: Path, tmp_path: Path, content: bytes | None
) -> None:
    folder = tmp_path / "done"
    shutil.copytree(runs / "done", folder)
    before = json.loads((folder / "result.json").read_text())
    (folder / "tracking.json").unlink()
    if content is not None:
        (folder / "tracking.json").write_bytes(content)
    said = narrowcast("run", "--resume", "done", "--output", tmp_path, f"tracking.uri=sqlite:///{runs}/mlflow.db")
    assert said.status == 0, said.err
    after = json.loads((folder / "result.json").read_text())
    lost = f"{folder / 'tracking.json'} is missing or damaged; its rounds go to a new run, {after['mlflow_run_id']}"
    assert said.err == f"WARNING: {lost}\n"
    assert after["mlflow_run_id"] != before["mlflow_run_id"]
    assert json.loads((folder / "tracking.json").read_text())["run_id"] == after["mlflow_run_id"]
    assert after["model_sha256"] == before["model_sha256"]


@pytest.mark.parametrize("content", [None, b"{}\n"])
def test_a_run_without_its_journal_repeats_its_rounds(runs: Path, tmp_path: Path, content: bytes | None) -> None:
    folder = tmp_path / "done"
    shutil.copytree(runs / "done", folder)
    (folder / "journal.jsonl").unlink()
    if content is not None:
        (folder / "journal.jsonl").write_bytes(content)
    said = narrowcast("run", "--resume", "done", "--output", tmp_path, f"tracking.uri=sqlite:///{runs}/mlflow.db")
    assert said.status == 0, said.err
    assert "checkpoint: round 2 is not in the journal; going on from round 0" in said.err
    before, after = (json.loads((each / "result.json").read_text()) for each in (runs / "done", folder))
    assert after["model_sha256"] == before["model_sha256"]
    assert after["uplink_bits"] == before["uplink_bits"]


def test_a_port_that_is_taken(runs: Path, silent_server: int) -> None:
    said = narrowcast("ui", "--output", runs, "--port", silent_server)
    assert_refused(said, f"port {silent_server} is taken (Address already in use); give another with --port")


def test_nobody_takes_the_port_while_the_store_is_read(
    runs: Path, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sockets may be bound to one port, by `SO_REUSEADDR`, for as long as neither listens."""

    def reading(_: StoreAddress) -> dict[str, str]:
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="Address already in use"):
                other.bind(("127.0.0.1", closed_port))
        raise UserError("read")

    monkeypatch.setattr(store, "pages_of_runs", reading)
    assert_refused(narrowcast("ui", "--output", runs, "--port", closed_port), "narrowcast: read")


@pytest.mark.slow
@pytest.mark.parametrize("number", sampled([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], [signal.SIGHUP]))
def test_the_ui_says_where_the_runs_are_and_leaves_no_process(runs: Path, closed_port: int, number: int) -> None:
    command = [sys.executable, "-m", "narrowcast", "ui", "--output", str(runs), "--port", str(closed_port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        address, _, page = process.stdout.readline().removeprefix("runs of narrowcast: ").partition("#")
        assert address.startswith(f"http://127.0.0.1:{closed_port}/?token=")
        assert page == "/experiments/1/runs?workflowType=machine_learning&viewStateShareKey=narrowcast\n"
        every = f"MLflow UI on {address}#/experiments?workflowType=machine_learning (stop with Ctrl-C)\n"
        assert process.stdout.readline() == every
        assert requests.get(address, timeout=100).ok
        servers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(30) == 0
        assert len(servers) > 1
        assert not psutil.wait_procs(servers, 10)[1]


def test_runs_that_no_store_holds_are_one_line(tmp_path: Path, closed_port: int) -> None:
    (tmp_path / "mlflow.db").write_text("garbage")
    said = narrowcast("ui", "--output", tmp_path, "--port", closed_port)
    assert_refused(said, "no MLflow store answers at sqlite:", "file is not a database", "tracking.uri")


def test_the_ui_of_a_server_is_at_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example:5000")
    said = narrowcast("ui", "--output", tmp_path)
    assert_refused(said, "the runs are tracked at http://mlflow.example:5000; open that address in a browser")


@pytest.mark.parametrize("word", ["backend.placement=scatter", "backend.actors=0"])
def test_what_is_said_of_the_executor_stands_beside_its_option(tmp_path: Path, word: str) -> None:
    """Of a packaged experiment that is played in this process, so that the option is another kind of executor."""
    said = narrowcast("run", "fedavg-digits", word, "--backend", "ray", "--output", tmp_path)
    assert_refused(said, "fedavg-digits.yaml: " + word.replace("=", " = ")[: word.index("=")])


def test_a_second_interrupt_while_a_command_ends_keeps_what_it_said_of_the_first() -> None:
    @cli.command("interrupted-twice", hidden=True)
    def interrupted_twice() -> None:
        try:
            raise RunFailed("interrupted; resume with: this")
        finally:
            try:
                Future[None]().result(timeout=0)
            except TimeoutError:
                raise KeyboardInterrupt  # noqa: B904 - as a signal raises it, while a process is waited for

    try:
        assert_refused(narrowcast("interrupted-twice"), "narrowcast: interrupted; resume with: this", status=1)
    finally:
        del cli.commands["interrupted-twice"]
