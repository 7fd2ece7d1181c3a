"""A link in a run's folder to a file outside it: the file arrives nowhere, and one line says so."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import Said, narrowcast
from narrowcast.platform.config.trust import leads_out, own_files
from narrowcast.tuning.result import StudyFolder

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
SECRET = "a-secret-key-of-the-user"


@pytest.fixture
def runs(run_and_solve: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder with a run and a solve of somebody else; beside it the user has a secret."""
    shutil.copytree(run_and_solve, tmp_path / "theirs", symlinks=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "key").write_text(SECRET)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "theirs"
    arrived = [
        path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink() and path.parent.name != "home"
    ]
    assert [path for path in arrived if SECRET.encode() in path.read_bytes()] == []


def linked(folder: Path, name: str, target: Path) -> Path:
    """Put a link in the place of a file."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    return path


def assert_said(said: Said, path: Path) -> None:
    """One line names the link."""
    lines = [line for line in said.err.splitlines() if "is a link to" in line]
    assert len(lines) == 1, said.err
    assert str(path) in lines[0]
    assert SECRET not in said.out + said.err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["notes.txt", "plots/accuracy.png", "deeper"])
def test_sync_sends_no_file_from_elsewhere(name: str, runs: Path, tmp_path: Path) -> None:
    target = tmp_path / "home" if name == "deeper" else tmp_path / "home" / "key"
    path = linked(runs / "digits", name, target)
    (runs / "digits" / "own.txt").symlink_to(runs / "digits" / "config.yaml")
    (runs / "digits" / "tracking.json").unlink()
    said = narrowcast("sync", "digits", "--output", runs, "--tracking-uri", f"sqlite:///{tmp_path}/store/mlflow.db")
    assert said.status == 0, said.err
    assert_said(said, path)
    sent = {each.name for each in (runs / "mlartifacts").rglob("*")}
    assert {"config.yaml", "result.json", "own.txt"} <= sent, "a link within the folder is followed"
    assert not sent & {"notes.txt", "accuracy.png", "key"}


@pytest.mark.parametrize("name", ["config.yaml", "partition/partition.png", "result.json", "rounds.parquet"])
def test_a_report_shows_no_file_from_elsewhere(name: str, runs: Path, tmp_path: Path) -> None:
    path = linked(runs / "digits", name, tmp_path / "home" / "key")
    said = narrowcast("report", runs / "digits")
    assert said.status == 2
    assert_said(said, path)
    assert not list(runs.rglob("report.html"))


@pytest.mark.parametrize("name", ["config.yaml", "journal.jsonl"])
def test_a_site_shows_none(name: str, runs: Path, tmp_path: Path) -> None:
    (runs / "asd" / "result.json").unlink()  # so that the journal is read
    path = linked(runs / "asd", name, tmp_path / "home" / "key")
    said = narrowcast("site", "asd", "--output", runs)
    assert said.status == 2
    assert_said(said, path)


@pytest.mark.parametrize(("run", "name"), [("digits", "model.safetensors"), ("asd", "answer.safetensors")])
def test_an_export_is_of_the_folders_own_file(run: str, name: str, runs: Path, tmp_path: Path) -> None:
    shutil.copy(runs / run / name, tmp_path / "home" / "private.safetensors")
    path = linked(runs / run, name, tmp_path / "home" / "private.safetensors")
    said = narrowcast("export", runs / run)
    assert said.status == 2
    assert_said(said, path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_nothing_is_written_through_a_link(runs: Path, tmp_path: Path) -> None:
    before = (tmp_path / "home" / "key").stat()
    for target in ("key", "new"):
        path = linked(runs / "digits", "journal.jsonl", tmp_path / "home" / target)
        said = narrowcast("sync", "digits", "--output", runs)
        assert said.status == 2
        assert_said(said, path)
    assert [each.name for each in (tmp_path / "home").iterdir()] == ["key"]
    assert (tmp_path / "home" / "key").stat().st_mtime_ns == before.st_mtime_ns


def test_a_study_sends_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "study"
    (folder / "plots").mkdir(parents=True)
    for name in ("result.json", "plots/a.png", "study.journal", "x.part"):
        (folder / name).write_text("own")
    (folder / "trials").mkdir()
    (folder / "trials" / "b").write_text("own")
    (tmp_path / "key").write_text(SECRET)
    (folder / "plots" / "key").symlink_to(tmp_path / "key")
    with caplog.at_level(logging.WARNING):
        sent = list(StudyFolder(folder).artifacts())
    assert [(path.name, within) for path, within in sent] == [("a.png", "plots"), ("result.json", None)]
    assert f"{folder}/plots/key is a link to {tmp_path}/key" in caplog.text


def test_links_of_every_kind(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "file").write_text("")
    for name, target in {
        "in": folder / "file",
        "relative": Path("inner/../file"),
        "out": tmp_path,
        "up": Path("../outside"),
        "absolute": Path("/etc/passwd"),
        "circle": Path("circle"),
        "beside": tmp_path / "folder-2",
        "twice": folder / "out" / "x",
    }.items():
        (folder / name).symlink_to(target)
    out = {path.name for path in folder.iterdir() if leads_out(path, folder)}
    assert out == {"out", "up", "absolute", "beside", "twice"}
    assert {path.name for path in own_files(folder)} == {"file", "in", "relative"}
    (tmp_path / "alias").symlink_to(folder)
    assert not leads_out(tmp_path / "alias" / "file", tmp_path / "alias"), "the user has named the link"
