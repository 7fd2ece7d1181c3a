"""Checkpoints on a real S3 server: kept, verified, resumed from, and what is said of one that is away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from command_line import TINY, assert_refused, narrowcast, terminated_after
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.state import RunState
from narrowcast.platform.storage.checkpoint import check_place, load_checkpoint, save_checkpoint
from s3_server import SECRET, S3Server

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    server = S3Server(tmp_path)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    try:
        yield server
    finally:
        server.kill()


def state_after(round_index: int) -> RunState:
    nobody = np.empty(0, dtype=np.int64)
    server = {"weights": np.full((300, 4), round_index, dtype=np.float32)}
    return RunState(round_index, server, nobody, nobody, {}, nobody, 1, 2, 3.5)


@pytest.mark.slow
def test_the_last_ones_are_kept_and_a_damaged_one_is_passed_over(
    s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    place = "s3://runs/here/run"
    check_place(place)
    for round_index in (1, 2, 3):
        save_checkpoint(place, state_after(round_index), "digest", keep=2)
    names = s3.keys("here/run/")
    assert [name[:24] for name in names] == ["here/run/round-000000002", "here/run/round-000000003"]
    assert load_checkpoint(place, RunState)[0].round_index == 3
    with pytest.raises(UserError, match="holds another run's checkpoints"):
        check_place(place)

    content = s3.client.get_object(Bucket="runs", Key=names[1])["Body"].read()
    for cut in (0, 7, len(content) - 1):
        s3.client.put_object(Bucket="runs", Key=names[1], Body=content[:cut])
        loaded, digest, _ = load_checkpoint(place, RunState)
        assert (loaded.round_index, digest) == (2, "digest")
        assert np.array_equal(loaded.server["weights"], state_after(2).server["weights"])
        assert "is damaged" in caplog.text
    with pytest.raises(
        UserError, match=r"checkpoint_path: cannot write to s3://nobody/x .*'nobody' not found.*another"
    ):
        check_place("s3://nobody/x")


@pytest.mark.slow
def test_a_run_goes_on_from_there_and_says_where_the_store_is_away(s3: S3Server, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    words = ("run", *TINY, "--output", runs, "checkpoint_seconds=600")
    with terminated_after(3, runs / "torn"):
        said = narrowcast(*words, "name=torn", "rounds=1000000", "checkpoint_path=s3://runs/kept")
    assert_refused(said, "interrupted; resume with: narrowcast run --resume torn", status=1)
    played = (runs / "torn" / "journal.jsonl").read_bytes().count(b"\n")
    assert [name[:23] for name in s3.keys("kept/torn/")][-1] == f"kept/torn/round-{played:09d}"[:23]
    assert not (runs / "torn" / "checkpoint").exists()
    assert narrowcast("run", "--resume", "torn", "--output", runs, f"rounds={played + 1}").status == 0
    assert narrowcast(*words, "name=straight", f"rounds={played + 1}").status == 0
    torn, straight = (json.loads((runs / name / "result.json").read_text()) for name in ("torn", "straight"))
    assert torn["model_sha256"] == straight["model_sha256"]

    s3.kill()
    resumed = narrowcast("run", "--resume", "torn", "--output", runs, f"rounds={played + 2}")
    assert_refused(resumed, "the checkpoints in s3://runs/kept/torn cannot be read", "Could not connect to server")
    new = narrowcast(*words, "name=new", "checkpoint_path=s3://runs/kept")
    assert_refused(new, "checkpoint_path: cannot write to s3://runs/kept/new", "give another")
    written = b"".join(path.read_bytes() for path in runs.rglob("*") if path.is_file())
    assert SECRET not in said.out + said.err + resumed.err + new.err
    assert SECRET.encode() not in written
