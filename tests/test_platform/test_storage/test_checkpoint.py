"""Checkpoints: what is saved is what is loaded, and nothing else loads."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import struct
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.numpy import load, save

from narrowcast.algorithms.federated.low_rank import SCoLR
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.model import ITEM_FACTORS, USER_FACTORS
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.state import RunState
from narrowcast.platform.storage.checkpoint import check_place, load_checkpoint, save_checkpoint


def make_state(round_index: int = 3) -> RunState:
    random = np.random.default_rng(round_index)
    return RunState(
        round_index=round_index,
        server={
            ITEM_FACTORS: random.standard_normal((7, 4), dtype=np.float32),
            "update": random.standard_normal((4, 7), dtype=np.float32).T,  # not contiguous
            "changed_rows": random.random(7) < 0.5,
        },
        clients={USER_FACTORS: np.array([[0.1, np.nan, np.inf, -0.0]], dtype=np.float32)},
        participants=np.array([4], dtype=np.int64),
        last_round=np.array([3], dtype=np.int64),
        update_bits=np.arange(round_index, dtype=np.int64),
        uplink_bits=2**70,
        downlink_bits=12345,
        simulated_seconds=0.1 + 0.2,
    )


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def put(folder: Path, content: bytes, round_index: int = 3) -> Path:
    """Write a file under the name that a checkpoint of this content has."""
    path = folder / f"round-{round_index:09d}.{hashlib.sha256(content).hexdigest()}.safetensors"
    path.write_bytes(content)
    return path


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("saved")
    save_checkpoint(folder, make_state(), "digest")
    return next(folder.iterdir()).read_bytes()


@pytest.mark.parametrize("round_index", [0, 3])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["folder", "url"])
def test_every_field_comes_back_as_it_was(tmp_path: Path, round_index: int, elsewhere: bool) -> None:
    place = f"memory://{tmp_path}" if elsewhere else str(tmp_path / "new" / "checkpoint")
    saved = make_state(round_index)
    save_checkpoint(place, saved, "a digest")
    loaded, digest, _ = load_checkpoint(place, RunState)
    assert digest == "a digest"
    for field in fields(RunState):
        before, after = getattr(saved, field.name), getattr(loaded, field.name)
        before, after = (each if isinstance(each, dict) else {"": each} for each in (before, after))
        assert sorted(before) == sorted(after)
        for name in before:
            assert type(before[name]) is type(after[name]), field.name
            assert np.asarray(before[name]).dtype == np.asarray(after[name]).dtype
            np.testing.assert_array_equal(before[name], after[name])
    assert model_sha256(SCoLR(), loaded) == model_sha256(SCoLR(), saved)


@pytest.mark.slow
def test_one_cut_off_at_any_byte_is_refused_and_the_one_before_it_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for round_index in (3, 4):
        save_checkpoint(tmp_path, make_state(round_index), "digest")
    last = tmp_path / files(tmp_path)[-1]
    content = last.read_bytes()
    assert load_checkpoint(tmp_path, RunState)[0].round_index == 4
    with caplog.at_level(logging.WARNING):
        for cut in range(len(content)):
            last.write_bytes(content[:cut])
            caplog.clear()
            assert load_checkpoint(tmp_path, RunState)[0].round_index == 3, cut
            assert f"{last.name} is damaged (its {cut} bytes have another sha256" in caplog.text
            assert caplog.text.endswith("going on from round 3\n")


def test_a_flipped_bit_is_refused(tmp_path: Path, content: bytes) -> None:
    path = put(tmp_path, content)
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"is damaged \(its .*start it again"):
            load_checkpoint(tmp_path, RunState)


def with_metadata(content: bytes, **changes: str | None) -> bytes:
    length = struct.unpack("<Q", content[:8])[0]
    metadata = json.loads(content[8 : 8 + length])["__metadata__"] | changes
    return save(load(content), {key: value for key, value in metadata.items() if value is not None})


def test_metadata_can_be_changed_for_the_tests_below(tmp_path: Path, content: bytes) -> None:
    put(tmp_path, with_metadata(content, round_index="5"))
    assert load_checkpoint(tmp_path, RunState)[0].round_index == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "narrowcast-1"}, 'format "narrowcast-1"; this version reads narrowcast-3'),
        ({"format": None}, 'format "None"; this version reads narrowcast-3'),
        ({"round_index": "three"}, "is damaged"),
        ({"uplink_bits": None}, "is damaged"),
        ({"simulated_seconds": "soon"}, "is damaged"),
        ({"config": None}, "is damaged"),
    ],
)
def test_another_format_and_bad_metadata_are_refused(
    tmp_path: Path, content: bytes, changes: dict[str, str | None], message: str
) -> None:
    put(tmp_path, with_metadata(content, **changes))
    with pytest.raises(UserError, match=message):
        load_checkpoint(tmp_path, RunState)


@pytest.mark.parametrize(
    ("foreign", "message"),
    [
        (save({"weight": np.zeros(3)}, {"format": "pt"}), 'format "pt"; this version reads narrowcast-3'),
        (save({"weight": np.zeros(3)}), 'format "None"'),
        (save({}, {"format": "narrowcast-3"}), "is damaged"),
        (b"not a checkpoint at all", "is damaged"),
        (b"", "is damaged"),
        (struct.pack("<Q", 2) + b"[]", "is damaged"),
        (struct.pack("<Q", 2**62) + b"{}", "is damaged"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, foreign: bytes, message: str) -> None:
    put(tmp_path, foreign)
    with pytest.raises(UserError, match=message):
        load_checkpoint(tmp_path, RunState)


@pytest.mark.parametrize("there", [None, "folder", "directory"])
def test_a_missing_checkpoint_is_said_to_be_missing(tmp_path: Path, content: bytes, there: str | None) -> None:
    folder = tmp_path / "checkpoint"
    if there:
        folder.mkdir()
    if there == "directory":
        put(tmp_path, content).rename(tmp_path / "elsewhere")
        (folder / f"round-{3:09d}.{hashlib.sha256(content).hexdigest()}.safetensors").mkdir()
    with pytest.raises(UserError, match=r"no checkpoint in .*checkpoint; .*start it again"):
        load_checkpoint(folder, RunState)


class Dangerous:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "was_run"
    harmful = pickle.dumps(Dangerous(trace))
    put(tmp_path, harmful)
    with pytest.raises(UserError, match="is damaged"):
        load_checkpoint(tmp_path, RunState)
    assert not trace.exists()
    pickle.loads(harmful)
    assert trace.exists(), "the pickle was harmless, so the test says nothing"


def test_the_last_ones_are_kept_and_what_was_cut_off_is_swept_away(tmp_path: Path, content: bytes) -> None:
    for round_index in (3, 4, 5):
        (tmp_path / f"round-{round_index:09d}.part").write_bytes(content[:round_index])
        (tmp_path / f".tmp{round_index}").write_bytes(content[:round_index])
        save_checkpoint(tmp_path, make_state(round_index), "digest", keep=2)
    assert [name[:15] for name in files(tmp_path)] == ["round-000000004", "round-000000005"]
    # Round 5 was refused and the run went on from round 3, say: what is ahead is nothing to fall back upon.
    save_checkpoint(tmp_path, make_state(4), "digest", keep=2)
    assert {name[:15] for name in files(tmp_path)} == {"round-000000004"}


def test_places_that_cannot_be_had_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, message in (
        (f"{tmp_path}/file/checkpoint", "checkpoint_path: cannot write to .* give another"),
        ("nosuch://there", "checkpoint_path = nosuch://there: .*give a folder"),
        ("gs://there", "checkpoint_path = gs://there: .*gcsfs"),
    ):
        with pytest.raises(UserError, match=message):
            check_place(place)
    check_place(tmp_path / "new")
    save_checkpoint(tmp_path / "new", make_state(), "digest")
    with pytest.raises(UserError, match="holds another run's checkpoints"):
        check_place(tmp_path / "new")


def test_a_store_that_fails_says_so_as_a_file_system_would(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("403")

    monkeypatch.setattr(MemoryFileSystem, "put_file", refuse)
    with pytest.raises(OSError, match="RuntimeError: 403"):
        save_checkpoint("memory://refused", make_state(), "digest")
