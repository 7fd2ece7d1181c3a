"""A run and its MLflow run: closed however the run ends, and replaced where the store does not have it any more."""

from __future__ import annotations

import logging
import shutil
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

import narrowcast as nc
from command_line import assert_refused, narrowcast, run_folders
from narrowcast.platform.config import plugins
from narrowcast.platform.config.run_fields import StoreAddress
from narrowcast.platform.storage.disk import Disk, use_disk
from narrowcast.platform.storage.journal import Journal, locked
from narrowcast.platform.tracking import sender as mlflow_run
from narrowcast.platform.tracking.cursor import Cursor
from narrowcast.platform.tracking.sender import Sender
from narrowcast.runs.session import sync_run

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
SETTINGS = {"data.clients": 20, "rounds": 3, "tracking.system_metrics": False, "name": "digits"}


def run(output: Path, **overrides: Any) -> Any:
    return nc.run("fedavg-digits", {**SETTINGS, **overrides}, output=output, backend="local", progress=False)


def resume(output: Path, rounds: int, name: str = "digits", **overrides: Any) -> Any:
    settings = {**SETTINGS, "name": name, "rounds": rounds, **overrides}
    return nc.run("fedavg-digits", settings, output=output, backend="local", resume=name, progress=False)


def runs_in(store: str) -> list[Run]:
    return list(MlflowClient(store).search_runs(["1"]))


def sent(store: str, run_id: str) -> list[int]:
    return [each.step for each in MlflowClient(store).get_metric_history(run_id, "loss")]


@pytest.fixture(scope="module")
def _first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs")
    run(output)
    return output


@pytest.fixture
def output(_first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder with a run of three rounds, `digits`, and its store: moved there, so that both are its own."""
    output = tmp_path / "runs"
    shutil.copytree(_first, output)
    monkeypatch.chdir(output)
    cursor = Cursor.load(output / "digits")
    there = {**vars(cursor), "uri": f"sqlite:///{output}/mlflow.db", "folder": str(output / "digits")}
    Cursor(**there).save(output / "digits")
    with closing(sqlite3.connect(output / "mlflow.db")) as store, store:
        for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
            store.execute(f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (str(_first), str(output)))
    return output


@pytest.mark.parametrize("lost", ["deleted", "store removed", "other store", "position removed", "position damaged"])
def test_a_run_goes_on_in_a_new_mlflow_run_if_its_own_is_gone(
    output: Path, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, overrides = Cursor.load(output / "digits"), {}
    store = f"sqlite:///{output}/mlflow.db"
    if lost == "deleted":
        MlflowClient(store).delete_run(before.run_id)
    elif lost == "store removed":
        (output / "mlflow.db").unlink()
    elif lost == "other store":
        store = overrides["tracking.uri"] = f"sqlite:///{output}/other.db"
    elif lost == "position removed":
        (output / "digits" / "tracking.json").unlink()
    else:
        (output / "digits" / "tracking.json").write_text("{")
    result = resume(output, 5, **overrides)
    warnings = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warnings) == 1
    after = Cursor.load(output / "digits")
    assert warnings[0].endswith(f"its rounds go to a new run, {after.run_id}")
    assert after.run_id == result.file.mlflow_run_id != before.run_id
    assert sent(store, after.run_id) == [1, 2, 3, 4, 5]
    stored = MlflowClient(store).get_run(after.run_id)
    assert stored.info.status == "FINISHED"
    assert stored.data.tags["model_sha256"] == result.file.model_sha256
    assert stored.inputs.dataset_inputs[0].dataset.name == "digits"


def test_what_is_sent_later_goes_to_a_new_run_if_the_old_one_is_gone(
    output: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, before = f"sqlite:///{output}/mlflow.db", Cursor.load(output / "digits")
    params = MlflowClient(store).get_run(before.run_id).data.params
    MlflowClient(store).delete_run(before.run_id)
    assert sync_run(output / "digits", None) == 3
    after = Cursor.load(output / "digits")
    assert "has no run" in caplog.text
    assert sent(store, after.run_id) == [1, 2, 3]
    stored = MlflowClient(store).get_run(after.run_id)
    assert (stored.info.status, stored.info.run_name) == ("FINISHED", "digits")
    assert stored.data.params == params
    assert stored.inputs.dataset_inputs[0].dataset.name == "digits"
    assert sync_run(output / "digits", None) == 0
    (output / "digits" / "tracking.json").unlink()
    assert sync_run(output / "digits", None) == 3


def test_a_copy_of_a_run_does_not_write_into_the_mlflow_run_of_the_original(output: Path) -> None:
    store, original = f"sqlite:///{output}/mlflow.db", Cursor.load(output / "digits")
    shutil.copytree(output / "digits", output / "copy")
    resume(output, 4, "copy")
    assert sent(store, original.run_id) == [1, 2, 3]
    assert sent(store, Cursor.load(output / "copy").run_id) == [1, 2, 3, 4]
    (output / "copy").rename(output / "moved")
    resume(output, 5, "moved")
    assert sent(store, Cursor.load(output / "moved").run_id) == [1, 2, 3, 4, 5]
    assert len(runs_in(store)) == 2


class DiskWithout(Disk):
    """A disk that has no room for the files of one name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create(self, path: Path, content: bytes, mode: int = 0o666) -> None:
        if path.name.startswith(self._name):
            raise OSError(28, "No space left on device", str(path))
        super().create(path, content, mode)

    def write_with(self, path: Path, write: Any) -> None:
        if path.name.startswith(self._name):
            raise OSError(28, "No space left on device", str(path))
        super().write_with(path, write)


@pytest.mark.parametrize("name", ["tracking.json", "config.yaml", "round-"])
def test_a_run_that_fails_before_its_first_checkpoint_leaves_a_failed_mlflow_run_and_no_folder(
    tmp_path: Path, name: str
) -> None:
    with use_disk(DiskWithout(name)), pytest.raises(nc.RunFailed, match="No space left on device"):
        run(tmp_path)
    assert run_folders(tmp_path) == []
    assert [each.info.status for each in runs_in(f"sqlite:///{tmp_path}/mlflow.db")] == ["FAILED"]


MODEL = """
import torch

def linear():
    def later():
        import broken_beside
    return torch.nn.Linear(64, 10)
"""


def test_a_module_beside_a_plugin_that_is_no_python_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "own_linear_model.py").write_text(MODEL)
    (tmp_path / "broken_beside.py").write_text("def half(:\n")
    (tmp_path / "own.yaml").write_text(
        "data: digits\nmodel: {kind: torch, factory: 'own_linear_model:linear'}\nalgorithm: fedavg\n"
    )
    said = narrowcast("run", tmp_path / "own.yaml", "--backend", "local", "--output", tmp_path / "runs")
    assert_refused(said, "broken_beside.py: not valid Python (invalid syntax")
    assert not (tmp_path / "runs").exists()
    source = (tmp_path / "own_linear_model.py").resolve()
    assert source in plugins.loaded()  # so that no later run of this process is refused for what this one imports
    source.unlink()
    assert source not in plugins.loaded()


class FailingDisk(Disk):
    """A disk that cannot write the journal back."""

    def sync(self, path: Path) -> None:
        if path.name == "journal.jsonl":
            raise OSError(5, "Input/output error", str(path))


def test_a_disk_that_fails_is_not_reported_as_the_store_s_fault(output: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = output / "digits"
    cursor = Cursor(Cursor.load(folder).uri, Cursor.load(folder).run_id)
    with use_disk(FailingDisk()):
        sender = Sender(folder, StoreAddress(cursor.uri), cursor, Journal.open(folder))
        assert not sender.close(60, "FAILED")
    assert [each.getMessage().partition(" (")[0] for each in caplog.records] == [f"cannot write to {folder}"]


def test_a_call_that_fails_as_none_should_is_said_once_and_made_again(
    output: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, whole, calls = output / "digits", mlflow_run.send_rounds, count()

    def send(store: StoreAddress, run_id: str, rows: Sequence[Mapping[str, Any]]) -> int:
        if next(calls) < 2:
            raise KeyError("logged_at_ms")
        return whole(store, run_id, rows)

    monkeypatch.setattr(mlflow_run, "send_rounds", send)
    monkeypatch.setattr(mlflow_run, "_RETRY_SECONDS", 0.01)
    cursor = Cursor(Cursor.load(folder).uri, Cursor.load(folder).run_id)
    sender = Sender(folder, StoreAddress(cursor.uri), cursor, Journal.open(folder))
    deadline = time.monotonic() + 60
    while not sender.cursor.sent_rounds and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sender.close(60, "FAILED")
    assert [each.getMessage() for each in caplog.records] == [
        f"the rounds of {folder} are not sent to MLflow (KeyError: 'logged_at_ms')"
    ]


def test_two_runs_report_the_outage_of_their_store_once(output: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, uri = output / "digits", "http://127.0.0.1:9"
    senders = [Sender(folder, StoreAddress(uri), Cursor(uri, "a"), Journal.open(folder)) for _ in range(2)]
    while len(mlflow_run._outages._waiting.get(uri, ())) < len(senders):  # one that ends first would end the outage
        time.sleep(0.01)
    assert not any(each.close(60, "FAILED") for each in senders)
    assert sum("the MLflow store is down" in each.getMessage() for each in caplog.records) == 1


def test_a_run_that_others_wait_for_does_not_keep_them_from_being_sent(output: Path) -> None:
    shutil.copytree(output / "digits", output / "other")
    with locked(output / "digits"):
        said = narrowcast("sync", output)
    assert said.status == 2
    assert said.err.splitlines()[-1].startswith(f"narrowcast: another process is at work on {output / 'digits'}")
    assert said.out.splitlines() == ["other: 3 rounds sent, MLflow is up to date"]
