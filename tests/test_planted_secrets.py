"""Secrets planted wherever one can be given are found in nothing that is written, shown or listed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

import psutil
import psycopg
import pytest
import requests
from psycopg import sql
from pydantic import BaseModel

from command_line import narrowcast
from narrowcast.cluster.deployment import Deployment
from narrowcast.experiment import Experiment, build_experiment
from narrowcast.packaged import read_experiment
from narrowcast.platform.config.files import validate
from narrowcast.platform.config.kinds import Registry
from narrowcast.platform.errors import UserError
from narrowcast.tuning.settings import StudySettings
from narrowcast.tuning.study_file import build_study
from planted import Planted, Watched
from postgres import Postgres
from ray_nodes import RayNodes
from scratch import short_folder
from studies import EXPERIMENT, ONE_OBJECTIVE, RATES, write_study

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
TOO_LONG_A_SEARCH = 6  # levels of models within models


def text_fields(model: type[BaseModel], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the dotted path of every field that takes a text or a path, with the kinds that lead to it."""
    for name, field in model.model_fields.items():
        path = prefix + name
        parts = list(_parts(field.annotation))
        if name != "kind" and any(part in (str, Path, Any) for part in parts):
            yield path, {}
        registries = [each for each in (*field.metadata, *parts) if isinstance(each, Registry)]
        models = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
        for each in {*models, *(kind for registry in registries for kind in registry.values())}:
            if depth < TOO_LONG_A_SEARCH:
                kind = each.model_fields.get("kind")
                chosen = {f"{path}.kind": str(kind.default)} if kind is not None else {}
                for inner, kinds in text_fields(each, f"{path}.", depth + 1):
                    yield inner, {**chosen, **kinds}


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in (*get_args(annotation), *getattr(annotation, "__metadata__", ())):
        yield from _parts(part)


def put(values: dict[str, Any], path: str, value: str) -> None:
    """Set the value at a dotted path; what is no section on the way there is replaced by one."""
    *parents, last = path.split(".")
    for key in parents:
        if not isinstance(values.get(key), dict):
            values[key] = {}
        values = values[key]
    values[last] = value


def with_secret(
    fields: Iterator[tuple[str, dict[str, str]]], base: dict[str, Any]
) -> Iterator[tuple[str, Any, Planted]]:
    """Yield each path, the values with an address there that has a user, a password and a token, and the secrets."""
    for path, kinds in fields:
        for scheme in ("https", "postgresql"):
            planted, values = Planted(), deepcopy(base)
            for place, kind in kinds.items():
                put(values, place, kind)
            address = f"{scheme}://alice:{planted.encoded('password')}@host/x?token={planted.encoded('token')}"
            put(values, path, address)
            yield path, values, planted


def test_no_field_of_an_experiment_writes_a_secret_down() -> None:
    base, _ = read_experiment("scolr-ml100k")
    accepted, tried = set(), set()
    for path, values, planted in with_secret(text_fields(Experiment), base):
        tried.add(path)
        try:
            experiment = build_experiment(values, "mine.yaml")
        except UserError as error:
            assert planted.found_in(str(error)) == [], path
            continue
        accepted.add(path)
        assert planted.found_in(json.dumps(experiment.plain())) == [], path
        assert planted.found_in(json.dumps(experiment.identity())) == [], path
    assert accepted == {"tracking.uri"}, "the only field that may hold a password, which is hidden where it is written"
    assert {"checkpoint_path", "backend.address", "tracking.experiment", "data.path", "name"} <= tried
    assert len(tried) > 12


def test_no_field_of_a_study_or_of_a_cluster_writes_a_secret_down() -> None:
    study: dict[str, Any] = {
        "experiment": {"base": "fedavg-digits"},
        "study": {"objectives": {"validation.accuracy": "maximize"}},
        "space": {"training.learning_rate": [0.1, 0.2]},
    }
    accepted, tried = set(), set()
    fields = (
        (f"study.{path}", {f"study.{at}": kind for at, kind in kinds.items()})
        for path, kinds in text_fields(StudySettings)
    )
    for path, values, planted in with_secret(fields, study):
        tried.add(path)
        try:
            read = build_study(values, "study.yaml", ())
        except UserError as error:
            assert planted.found_in(str(error)) == [], path
            continue
        accepted.add(path)
        assert planted.found_in(json.dumps(read.plain(), default=str)) == [], path
    assert accepted == {"study.storage"}
    assert {"study.storage", "study.address"} <= tried
    for path, values, planted in with_secret(text_fields(Deployment), {}):
        with pytest.raises(UserError) as refused:
            validate(Deployment, values, "cluster.yaml")
        assert planted.found_in(str(refused.value)) == [], path


@pytest.mark.parametrize(
    "words",
    [
        ("run", "scolr-ml100k", "--backend", "local", "tracking.uri={}"),
        ("run", "scolr-ml100k", "--backend", "ray", "--address", "alice:{secret}@127.0.0.1:9"),
        ("run", "scolr-ml100k", "--address", "{}"),
        ("run", "scolr-ml100k", "tracking.url={}"),
        ("run", "scolr-ml100k", "data.path={}"),
        ("tune", "{study}", "--storage", "{}"),
        ("tune", "{study}", "--address", "{}"),
        ("submit", "scolr-ml100k", "--address", "{}"),
        ("submit", "scolr-ml100k", "--address", "http://alice:{secret}@127.0.0.1:9"),
        ("jobs", "list", "--address", "{}"),
        ("doctor", "--address", "http://alice:{secret}@127.0.0.1:9"),
        ("manifest", "compose", "mlflow.artifacts=s3://key:{secret}@bucket"),
        ("sync", "{run}", "--tracking-uri", "{}"),
        ("ui", "--port", "1"),
    ],
    ids=lambda words: " ".join(words[:2] + words[-2:]),
)
@pytest.mark.parametrize("scheme", ["http", "postgresql"])
def test_no_option_shows_a_secret_where_it_fails(
    words: tuple[str, ...], scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = Planted()
    secret = planted.secret("option", "/#?")
    address = f"{scheme}://alice:{secret}@127.0.0.1:9/x?password={secret}"
    for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS", "NARROWCAST_STORAGE"):
        monkeypatch.setenv(name, f"{scheme}://alice:{planted.encoded(name)}@127.0.0.1:9/x")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tracking.json").write_text('{"uri": "sqlite:///x.db", "run_id": "1"}')
    filled = [
        word.replace("{}", address)
        .replace("{secret}", secret)
        .replace("{study}", str(write_study(tmp_path)))
        .replace("{run}", str(tmp_path / "run"))
        for word in words
    ]
    monkeypatch.chdir(tmp_path)
    said = narrowcast(*filled)
    assert said.status in (1, 2), said
    assert planted.found_in(said.out) == planted.found_in(said.err) == []
    assert list(planted.found_in_files([tmp_path])) == []


class Stage:
    """An account whose environment is full of secrets, a database for its stores, and all that its commands say."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.planted, self._database, self.folder, self.scratch = Planted(), Postgres(), folder, scratch
        self.inputs = folder / "inputs"
        self.shown: list[str] = []
        self._database.start()
        with psycopg.connect(self._database.url, autocommit=True) as connection:
            connection.execute("CREATE DATABASE studies")  # MLflow and Optuna each have tables of the same names
        self.env = {
            **os.environ,
            "TMPDIR": str(scratch),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.planted.secret("RAY_AUTH_TOKEN", ""),
            "MLFLOW_TRACKING_URI": self.address("MLFLOW_TRACKING_URI"),
            "MLFLOW_TRACKING_USERNAME": "alice",
            "MLFLOW_TRACKING_PASSWORD": self.planted.secret("MLFLOW_TRACKING_PASSWORD"),
            "AWS_SECRET_ACCESS_KEY": self.planted.secret("AWS_SECRET_ACCESS_KEY"),
            "NARROWCAST_STORAGE": self.address("NARROWCAST_STORAGE").replace("/postgres", "/studies"),
            "PGPASSWORD": self.planted.secret("PGPASSWORD"),
        }
        self._write_inputs()

    def _write_inputs(self) -> None:
        """Write an experiment and a study with a store of its own, which only their owner may read."""
        self.inputs.mkdir()
        experiment = {**read_experiment("fedavg-digits")[0], "name": "own", "rounds": 2}
        (self.inputs / "own.yaml").write_text(json.dumps(experiment))
        store = f"tracking: {{system_metrics: false, uri: '{self.address('experiment.tracking.uri')}'}}"
        study = EXPERIMENT.replace("tracking: {system_metrics: false}", store)
        write_study(self.inputs, study + ONE_OBJECTIVE + RATES)

    def address(self, place: str) -> str:
        """Return the database's address with a new password, which it does not ask for."""
        return self._database.url.replace("study@", f"study:{self.planted.encoded(place)}@")

    def say(self, *words: object, **more: str) -> int:
        """Run a command as a process, and keep what it says."""
        command = [sys.executable, "-m", "narrowcast", *map(str, words)]
        env = {**self.env, **more}
        done = subprocess.run(
            command, check=False, env=env, cwd=self.folder, capture_output=True, text=True, timeout=300
        )
        self.shown.extend((done.stdout, done.stderr))
        return done.returncode

    def assert_clean(self) -> None:
        """Assert that no table, no file outside the folder of inputs, and no output has a secret."""
        dump = dumped(self._database.url) + dumped(self._database.url.replace("/postgres", "/studies"))
        assert b"accuracy" in dump
        assert self.planted.found_in(dump) == []
        assert self.planted.found_in("".join(self.shown)) == []
        found = self.planted.found_in_files([self.folder])
        assert [each for each in found if self.inputs not in Path(each[0]).parents] == []

    def end(self) -> None:
        """Take the database away."""
        self._database.remove()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with short_folder() as scratch:
        stage = Stage(tmp_path_factory.mktemp("stage"), scratch)
        yield stage
        stage.end()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_that_runs_and_studies_write_show_or_list_has_a_secret(stage: Stage) -> None:
    output = ("--output", stage.folder / "runs")
    with Watched(stage.planted, stage.scratch) as watched:
        assert stage.say("run", "fedavg-digits", "--backend", "ray", "rounds=3", *output) == 0, stage.shown
        study = ("tune", stage.inputs / "digits.yaml", "study.trials=2", "experiment.rounds=4", *output)
        assert stage.say("--log-format", "json", *study) == 0, stage.shown
        down = f"http://alice:{stage.planted.encoded('a store that is down')}@127.0.0.1:9"
        assert stage.say("run", stage.inputs / "own.yaml", *output, MLFLOW_TRACKING_URI=down) == 2
        _look_at_the_pages(stage.env, stage.folder)
    assert stage.planted.places >= 8
    assert watched.commands > 20
    assert watched.files > 5, "Ray's logs were looked at"
    assert watched.seen == set()
    stage.assert_clean()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_has_a_secret_in_its_packed_folder_only(stage: Stage) -> None:
    nodes = RayNodes(1, token=stage.env["RAY_AUTH_TOKEN"])
    try:
        to = ("--address", nodes.address)
        with Watched(stage.planted, stage.scratch) as watched:
            job = (stage.inputs / "own.yaml", "backend=local", "--id", "job", "--output", stage.folder / "jobs")
            assert stage.say("submit", *job, *to) == 0, stage.shown
        assert stage.say("jobs", "list", *to) == 0
        for path in ("/api/jobs/", "/api/v0/tasks?detail=true", "/api/v0/workers?detail=true"):
            stage.shown.append(requests.get(nodes.address + path, headers=nodes.headers, timeout=20).text)
        of_ray = list(stage.planted.found_in_files(nodes.folders))
    finally:
        nodes.kill()
    assert (stage.folder / "jobs" / "job" / "result.json").is_file()
    assert watched.seen == set()
    stage.assert_clean()
    # See docs/shared-machine.md.
    assert {(Path(path).name, place) for path, place in of_ray} <= {("config.yaml", "MLFLOW_TRACKING_URI")}


def _look_at_the_pages(env: dict[str, str], folder: Path) -> None:
    """Start `narrowcast ui` on the store with a password, and end it once its server answers."""
    port = 20_000 + os.getpid() % 10_000
    command = [sys.executable, "-m", "narrowcast", "ui", "--port", str(port)]
    pages = subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert pages.stdout is not None
        address = pages.stdout.readline().partition(": ")[2].partition("#")[0]
        assert address.startswith(f"http://127.0.0.1:{port}/?token=")
        assert requests.get(address, timeout=120).ok
        time.sleep(1)  # for the list of processes
    finally:
        family = psutil.Process(pages.pid).children(recursive=True)
        pages.terminate()
        pages.communicate(timeout=60)
        psutil.wait_procs(family, timeout=20)


def dumped(url: str) -> bytes:
    """Return every table of a database as text."""
    with psycopg.connect(url) as connection:
        tables = connection.execute("SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'")
        parts = []
        for (name,) in tables.fetchall():
            with connection.cursor().copy(sql.SQL("COPY {} TO STDOUT").format(sql.Identifier(name))) as rows:
                parts += [bytes(row) for row in rows]
    return b"".join(parts)
