"""Checkpoints: what is saved is what is loaded, and nothing else loads."""

from __future__ import annotations

import json
import os
import pickle
import struct
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from narrowcast.algorithms.federated.scolr import SCoLR
from narrowcast.platform.checkpoint import load_checkpoint, save_checkpoint, write_atomically
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.matrix_factorisation import ITEM_FACTORS, USER_FACTORS
from narrowcast.platform.rounds import RunState, model_sha256

FILE = "state.safetensors"


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


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("saved")
    save_checkpoint(folder, make_state(), "digest")
    return (folder / FILE).read_bytes()


@pytest.mark.parametrize("round_index", [0, 3])
def test_every_field_comes_back_as_it_was(tmp_path: Path, round_index: int) -> None:
    saved = make_state(round_index)
    save_checkpoint(tmp_path / "new" / "checkpoint", saved, "a digest")
    loaded, digest = load_checkpoint(tmp_path / "new" / "checkpoint")
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


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, content: bytes) -> None:
    cuts = {0, 1, 7, 8, 9, len(content) - 1, *np.linspace(0, len(content) - 1, 60, dtype=int).tolist()}
    for cut in sorted(cuts):
        (tmp_path / FILE).write_bytes(content[:cut])
        with pytest.raises(UserError, match=r"state.safetensors is damaged \(.*start it again"):
            load_checkpoint(tmp_path)


def test_a_flipped_bit_in_the_header_is_refused_or_harmless(tmp_path: Path, content: bytes) -> None:
    header = 8 + struct.unpack("<Q", content[:8])[0]
    refused = 0
    for place in range(header):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        (tmp_path / FILE).write_bytes(damaged)
        try:
            load_checkpoint(tmp_path)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > header / 2


def with_metadata(content: bytes, **changes: str | None) -> bytes:
    length = struct.unpack("<Q", content[:8])[0]
    metadata = json.loads(content[8 : 8 + length])["__metadata__"] | changes
    return save(load(content), {key: value for key, value in metadata.items() if value is not None})


def test_metadata_can_be_changed_for_the_tests_below(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(with_metadata(content, round_index="5"))
    assert load_checkpoint(tmp_path)[0].round_index == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "narrowcast-1"}, 'has format "narrowcast-1"; this version reads narrowcast-2'),
        ({"format": None}, 'has format "None"; this version reads narrowcast-2'),
        ({"round_index": "three"}, "is damaged"),
        ({"uplink_bits": None}, "is damaged"),
        ({"simulated_seconds": "soon"}, "is damaged"),
        ({"config": None}, "is damaged"),
    ],
)
def test_another_format_and_bad_metadata_are_refused(
    tmp_path: Path, content: bytes, changes: dict[str, str | None], message: str
) -> None:
    (tmp_path / FILE).write_bytes(with_metadata(content, **changes))
    with pytest.raises(UserError, match=message):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("foreign", "message"),
    [
        (save({"weight": np.zeros(3)}, {"format": "pt"}), 'has format "pt"; this version reads narrowcast-2'),
        (save({"weight": np.zeros(3)}), 'has format "None"'),
        (save({}, {"format": "narrowcast-2"}), "is damaged"),
        (b"not a checkpoint at all", "is damaged"),
        (struct.pack("<Q", 2**62) + b"{}", "is damaged"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, foreign: bytes, message: str) -> None:
    (tmp_path / FILE).write_bytes(foreign)
    with pytest.raises(UserError, match=message):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("there", [None, "folder", "directory"])
def test_a_missing_checkpoint_is_said_to_be_missing(tmp_path: Path, there: str | None) -> None:
    folder = tmp_path / "checkpoint"
    if there:
        folder.mkdir()
    if there == "directory":
        (folder / FILE).mkdir()
    with pytest.raises(UserError, match=r"no checkpoint in .*checkpoint; .*start it again"):
        load_checkpoint(folder)


class Dangerous:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "was_run"
    harmful = pickle.dumps(Dangerous(trace))
    (tmp_path / FILE).write_bytes(harmful)
    with pytest.raises(UserError, match="is damaged"):
        load_checkpoint(tmp_path)
    assert not trace.exists()
    pickle.loads(harmful)
    assert trace.exists(), "the pickle was harmless, so the test says nothing"


@pytest.mark.parametrize("size", [0, 1, 500])
def test_a_write_that_was_cut_off_leaves_the_former_checkpoint(tmp_path: Path, content: bytes, size: int) -> None:
    save_checkpoint(tmp_path, make_state(3), "digest")
    part = tmp_path / (FILE + ".part")
    part.write_bytes(content[:size])
    assert load_checkpoint(tmp_path)[0].round_index == 3
    save_checkpoint(tmp_path, make_state(4), "digest")
    assert load_checkpoint(tmp_path)[0].round_index == 4
    assert not part.exists()


def test_a_write_that_fails_leaves_the_former_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"former")
    (tmp_path / "file.part").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"former"
