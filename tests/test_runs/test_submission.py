"""What is sent to a cluster and what is not, and what is told of one that cannot take it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from threading import Thread

import pytest
from packaging.requirements import Requirement
from pydantic import BaseModel

from command_line import assert_refused, narrowcast
from narrowcast import __version__
from narrowcast.api import check_source
from narrowcast.cluster.dashboard import ClusterNode, Dashboard, normalise
from narrowcast.cluster.node_probe import versions
from narrowcast.cluster.preflight import judge, judge_nodes
from narrowcast.experiment import load_experiment
from narrowcast.platform.config.run_fields import StoreAddress
from narrowcast.platform.errors import UserError
from narrowcast.runs.capacity import check_capacity
from narrowcast.runs.submission import Submission, _paths_in, prepare, with_password
from studies import ONE_OBJECTIVE, RATES

TRACE = "client,uplink_mbit_per_second,downlink_mbit_per_second,compute_speed\n0,1,1,1\n"


TWO_CPUS = {
    "ray_version": version("ray"),
    "data": {
        "result": {
            "result": [
                {"node_ip": "10.0.0.1", "is_head_node": True, "resources_total": {"CPU": 2}, "state": "ALIVE"},
            ]
        }
    },
}
"""What the dashboard of a cluster answers: its version, and its nodes."""


@pytest.fixture(autouse=True)
def _no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URI", "USERNAME", "PASSWORD"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)


def prepared(*overrides: str, name: str | None = None) -> Submission:
    return prepare("scolr-ml100k", overrides, name=name, output="/runs")


def test_the_packed_folder_is_the_run(tmp_path: Path) -> None:
    (tmp_path / "fleet.csv").write_text(TRACE)
    (tmp_path / "packed").mkdir()
    fleet = f"fleet={{kind: trace, path: {tmp_path / 'fleet.csv'}}}"
    sent = prepared("rounds=7", fleet, "backend={kind: ray, address: '10.0.0.1:6379'}")
    sent.pack(tmp_path / "packed")
    names = sorted(str(path.relative_to(tmp_path / "packed")) for path in (tmp_path / "packed").rglob("*.*"))
    assert names == ["config.yaml", "files/0-fleet.csv", "node_probe.py"]
    assert (tmp_path / "packed/files/0-fleet.csv").read_text() == TRACE
    with pytest.MonkeyPatch.context() as there:
        there.chdir(tmp_path / "packed")
        experiment = load_experiment("config.yaml")
    assert (experiment.rounds, experiment.name) == (7, sent.name)
    assert experiment.plain()["backend"]["address"] is None  # the job's own cluster
    assert sent.command == "python -m narrowcast run config.yaml --continue --output /runs"
    assert sent.metadata()["folder"] == f"/runs/{sent.name}"


def test_a_name_follows_from_what_is_asked_for() -> None:
    assert prepared().name == prepared().name
    others = [prepared("rounds=7"), prepared("seed=1"), prepare("scolr-ml100k", (), name=None, output="/elsewhere")]
    assert len({prepared().name, *(each.name for each in others)}) == 4
    assert prepared(name="mine").sha256 == prepared().sha256  # the same, under another name
    assert prepared(name="mine").values["name"] == "mine"


def test_a_password_goes_into_the_packed_folder_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = prepared("tracking.uri=https://mlflow.example.org")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://alice:pa55@mlflow.example.org")
    sent = prepared()
    sent.pack(tmp_path)
    assert "alice:pa55@" in (tmp_path / "config.yaml").read_text()
    assert "pa55" not in json.dumps([sent.name, sent.command, sent.sha256, sent.metadata(), dict(sent.environment)])
    assert (
        prepared("tracking.uri=https://alice:changed@mlflow.example.org").sha256 != plain.sha256
    )  # a user is one more
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "bob@lab")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "a/b")
    for address, with_bobs in (
        ("https://mlflow.example.org/x", "https://bob%40lab:a%2Fb@mlflow.example.org/x"),
        ("https://elsewhere.example.org/x", "https://elsewhere.example.org/x"),
        ("https://alice:pa55@mlflow.example.org", "https://alice:pa55@mlflow.example.org"),
        ("postgresql://db/x", "postgresql://db/x"),
    ):
        assert with_password(StoreAddress(address)) == with_bobs
    assert with_password(StoreAddress("https://own.org", "user")) == "https://bob%40lab:a%2Fb@own.org"


def test_a_study_runs_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, base = tmp_path / "mine.yaml", tmp_path / "base.yaml"
    base.write_text("data: ml-100k\nalgorithm: scolr\n")
    path.write_text(f"experiment: {{base: {base}}}\nstudy: {{trials: 3}}\nspace: {{}}\n")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example.org")
    sent = prepare(str(path), ["study.trials=5"], name=None, output="/runs")
    assert sent.command == "python -m narrowcast tune config.yaml --output /runs"
    assert sent.values["study"] == {"trials": 5}
    assert sent.values["experiment"] == {
        "base": "files/base.yaml",
        "tracking": {"uri": "https://mlflow.example.org", "credentials": "environment"},
    }
    assert sent.files == {"files/base.yaml": base}
    assert sent.name.startswith("mine-")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://alice:pa55@mlflow.example.org")
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI on the head"):
        prepare(str(path), [], name=None, output="/runs")


STUDY = """
experiment: fedavg-digits
study: {objectives: {validation.accuracy: maximize}, trials: 3}
space: {training.learning_rate: {kind: float, low: 0.1, high: 1}}
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothere.yaml",), 'no experiment "nothere.yaml": neither a file nor a packaged experiment'),
        (("study.yaml", "study.sampler=magic"), 'study.sampler.kind = "magic" is unknown'),
        (("study.yaml", "study.holdout=null"), "study.holdout = null: should be a mapping"),
        (
            ("study.yaml", "study.objectives={validation_accuracy: maximize}"),
            "validation_accuracy: should be a metric of",
        ),
        (
            ("study.yaml", "study.objectives={test.accuracy: maximize}"),
            "trials are chosen on validation; the best ones",
        ),
        (("study.yaml", "study.constraints={total_bit: {at_most: 3}}"), 'Did you mean "total_bits"?'),
        (("study.yaml", "experiment.rounds=0"), "rounds = 0: should be greater than or equal to 1"),
        (("completion-65", "seeds=[1,1]"), "seeds = [1, 1]: give different seeds"),
    ],
)
def test_what_is_wrong_is_said_before_the_cluster_is_asked(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("study.yaml").write_text(STUDY)
    said = narrowcast("submit", *words, "--address", "http://127.0.0.1:1")
    assert_refused(said, message)
    assert "Ray cluster" not in said.err


def test_a_benchmark_and_a_study_of_solves_run_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example.org")
    (tmp_path / "als.m").write_text("")
    octave = {"kind": "program", "command": ["octave-cli"], "script": str(tmp_path / "als.m")}
    solvers = json.dumps({"octave": octave, "asd": "asd"})
    (tmp_path / "mine.yaml").write_text(f"problems: {{a: synthetic_completion}}\nsolvers: {solvers}\n")
    sent = prepare(str(tmp_path / "mine.yaml"), ["workers=3", "backend=ray"], name=None, output="/runs")
    assert sent.command == "python -m narrowcast benchmark config.yaml --output /runs"
    assert (sent.values["workers"], sent.values["backend"]) == (3, "ray")
    assert sent.values["solve"] == {"tracking": {"uri": "https://mlflow.example.org", "credentials": "environment"}}
    assert sent.values["solvers"]["octave"]["script"] == "files/octave-als.m"
    assert sent.files == {"files/octave-als.m": tmp_path / "als.m"}
    study = prepare("scaled-asd-rank", ["study.trials=5"], name="ranks", output="/runs")
    assert study.command == "python -m narrowcast tune config.yaml --output /runs"
    assert study.values["solve"]["tracking"] == {"uri": "https://mlflow.example.org", "credentials": "environment"}


@pytest.mark.parametrize(
    ("words", "phrases"),
    [
        (["--output", "runs"], ["--output runs", "absolute path on the cluster"]),
        (["--env", "AWS_SECRET_ACCESS_KEY=x"], ["--env AWS_SECRET_ACCESS_KEY", "set secrets on the cluster"]),
        (["--env", "NO_SUCH_VARIABLE"], ["NO_SUCH_VARIABLE is not set here"]),
        (["--id", "no name"], ["name = 'no name'"]),
        (["algorithm.rank=0"], ["algorithm.scolr.rank"]),
        (["replicas.seed=[1,2]"], ["2 replicas"]),
    ],
    ids=["output", "secret", "unset", "name", "value", "replicas"],
)
def test_what_cannot_be_sent_is_refused(words: list[str], phrases: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    with answering(200, json.dumps(TWO_CPUS)) as address:
        said = narrowcast("submit", "scolr-ml100k", *words, "--address", address)
    assert_refused(said, *[phrase.replace("algorithm.scolr", "algorithm") for phrase in phrases])


@pytest.mark.parametrize(
    ("status", "body", "phrases"),
    [
        (200, '{"ray_version": "2.9.3"}', ["runs Ray 2.9.3", "this machine Ray", "pip install ray==2.9.3"]),
        (200, "<html>hello</html>", ["is not a Ray dashboard"]),
        (404, "", ["is not a Ray dashboard", "status 404"]),
        (401, "", ["token", "RAY_AUTH_TOKEN"]),
        (403, "", ["token", "RAY_AUTH_TOKEN"]),
    ],
    ids=["older", "page", "absent", "no-token", "wrong-token"],
)
def test_a_cluster_that_is_none_of_ours_is_told_before_anything_runs(
    status: int, body: str, phrases: list[str]
) -> None:
    with answering(status, body) as address:
        assert_refused(narrowcast("submit", "scolr-ml100k", "--address", address), address, *phrases)
        assert_refused(narrowcast("jobs", "list", "--address", address), address, *phrases)


@pytest.mark.parametrize("address", ["cluster", "cluster:x", "ray://cluster:10001", "", "http://cluster"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(UserError, match="give http://HEAD:8265"):
        normalise(address)
    assert normalise("head:8265/") == "http://head:8265"


def test_where_nobody_listens_is_told() -> None:
    assert_refused(narrowcast("jobs", "list", "--address", "127.0.0.1:9"), "no Ray cluster answers", "nothing listens")


NEEDED = [Requirement("torch>=2.6"), Requirement("numba>=0.61")]


@pytest.mark.parametrize(
    ("python", "changed", "message"),
    [
        ("3.10.4", {}, "Python 3.10.4; narrowcast needs 3.11"),
        ("3.11.7", {"narrowcast": None}, "no narrowcast; .* --send-package"),
        ("3.11.7", {"narrowcast": "0.0.1"}, "has narrowcast 0.0.1, this machine"),
        ("3.11.7", {"numba": None, "torch": None}, "lacks torch, numba; use an image"),
        ("3.11.7", {"torch": "2.1.0"}, r"too old: narrowcast needs torch>=2.6 \(has 2.1.0\)"),
    ],
)
def test_what_a_cluster_lacks_is_told(python: str, changed: dict[str, str | None], message: str) -> None:
    here = versions(["torch", "numba"])
    assert here["narrowcast"] == __version__
    assert judge("3.11.7", here, NEEDED) == []
    with pytest.raises(UserError, match=message):
        judge(python, {**here, **changed}, NEEDED)
    (note,) = judge("3.12.1", {**here, "torch": "2.99.0"}, NEEDED)
    assert "torch 2.99.0" in note


def test_what_one_node_lacks_is_told_of_that_node() -> None:
    healthy = {"python": "3.11.7", "packages": versions(["torch", "numba"])}
    broken = {"python": "3.11.7", "packages": {**healthy["packages"], "numba": None}}
    assert judge_nodes({"a": healthy, "b": healthy}, NEEDED) == []
    with pytest.raises(UserError, match=r"^the cluster lacks numba; use an image"):
        judge_nodes({"a": broken, "b": broken}, NEEDED)
    with pytest.raises(UserError, match=r"^the cluster, at b, d, e and 1 more, lacks numba; use an image"):
        judge_nodes({"a": healthy, **dict.fromkeys("bdef", broken)}, NEEDED)
    assert judge_nodes({"a": healthy, "b": None}, NEEDED) == ["these nodes did not report their packages: b"]


@pytest.mark.slow
def test_what_can_never_fit_is_told_before_torch_is_imported() -> None:
    """Which takes ten seconds and more where others use the machine."""
    with answering(200, json.dumps(TWO_CPUS)) as address:
        words = ["submit", "scolr-ml100k", "backend.actors=3", "--address", address]
        program = (
            f"import sys, narrowcast.cli.main as c; sys.argv[1:] = {words}\ntry: c.main()\nfinally: print(*sys.modules)"
        )
        said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert said.returncode == 2
    assert said.stderr.startswith("narrowcast: backend.actors = 3 with 1 CPU each")
    assert "room for 2 (10.0.0.1 2 CPU)" in said.stderr
    assert {"torch", "ray", "mlflow", "sklearn", "numba", "pandas"}.isdisjoint(said.stdout.split())


def test_a_solve_needs_no_client_hosts() -> None:
    nodes = json.loads(json.dumps(TWO_CPUS).replace('{"CPU": 2}', '{"CPU": 1}'))
    with answering(200, json.dumps(nodes)) as address:
        cluster = Dashboard(normalise(address), version("ray"))
        with pytest.raises(UserError, match=r"backend\.actors = 2 with 1 CPU each"):
            check_capacity("fedavg-digits", ["backend=ray"], cluster)
        check_capacity("completion-ill-conditioned", (), cluster)


BENCHMARK = "problems: {a: synthetic_completion}\nsolvers: {asd: asd, niht: niht}\n"


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("experiment: {base: fedavg-digits}\n" + ONE_OBJECTIVE + RATES, ("experiment.backend={kind: ray, actors: 9}",)),
        (BENCHMARK, ("workers=2",)),  # which is on Ray there
        (BENCHMARK + "backend: ray\nworkers: 2\n", ()),
    ],
    ids=("study", "benchmark", "benchmark on Ray"),
)
def test_studies_and_benchmarks_are_submitted_to_clusters_of_any_size(
    text: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    (file := tmp_path / "several.yaml").write_text(text)
    with answering(200, json.dumps(TWO_CPUS)) as address:
        check_source(str(file), overrides)
        check_capacity(str(file), overrides, Dashboard(normalise(address), version("ray")))
    assert prepare(str(file), overrides, name="several", output="/runs").values["name"] == "several"


class Station(BaseModel):
    path: Path | None = None


class Stations(BaseModel):
    codec: tuple[Station, ...]
    tiers: dict[str, list[Station]]


def test_files_that_lists_and_tables_name_are_found(tmp_path: Path) -> None:
    model = Stations(codec=(Station(), Station(path=tmp_path / "a")), tiers={"x": [Station(path=tmp_path / "b")]})
    assert list(_paths_in(model)) == [("codec.1.path", tmp_path / "a"), ("tiers.x.0.path", tmp_path / "b")]


def test_a_node_holds_what_fits_on_it_whole() -> None:
    node = ClusterNode("10.0.0.1", False, {"CPU": 3.0, "GPU": 1.0, "link": 0.3})
    assert node.holds({"CPU": 2}) == 1
    assert node.holds({"CPU": 1, "GPU": 0.5}) == 2
    assert node.holds({"link": 0.1}) == 3  # though 0.3 / 0.1 is less than 3
    assert node.holds({"TPU": 1}) == 0


@contextmanager
def answering(status: int, body: str) -> Iterator[str]:
    """Something that listens and gives everybody this answer."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
