"""What clients have answered is on disk before the answer leaves, and decides what they answer afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from narrowcast.algorithms.secure.answered_rounds import Accepted, AnsweredRounds
from narrowcast.algorithms.secure.key_store import KeyStore
from narrowcast.algorithms.secure.masking_client import Step
from narrowcast.algorithms.secure.schemes import Masked
from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.disk import use_disk
from narrowcast.platform.types import Arrays, PayloadError
from narrowcast.runs.folder import answered_file
from power_cuts import RULES, crash_state
from recording_disk import RecordingDisk

EVERYONE, FIRST = list(range(10)), [0, 1, 2, 3, 4, 5, 6, 7]
MODEL = np.full(32, 7, dtype=np.uint8)


def begin(clients: list[int] = EVERYONE) -> Arrays:
    groups = np.ones((len(clients), 1), dtype=np.uint8)
    return {"clients": np.array(clients), "groups": groups, "stops": np.full(len(clients), Step.NEVER)}


def secrets_of(clients: list[int] = EVERYONE, model: Any = MODEL) -> Arrays:
    return {"clients": np.array(clients), "model": model}


def reveal(listed: list[int] = FIRST, signed: Any = None) -> Arrays:
    signed = np.empty((0, 0), dtype=np.uint8) if signed is None else signed
    return {"clients": np.array(listed), "asked": np.array(listed), "signed": signed}


def same(left: Arrays, right: Arrays) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("adversary", ["honest_but_curious", "active"])
def test_a_lost_answer_is_given_again_to_the_byte(adversary: str, tmp_path: Path) -> None:
    store = KeyStore(Masked(adversary=adversary), tmp_path / "answered.jsonl")
    began, held = store.call("begin", 1, begin()), store.call("secrets", 1, secrets_of())
    signed = store.call("sign", 1, reveal())["signed"] if adversary == "active" else None
    revealed = store.call("reveal", 1, reveal(signed=signed))
    size = (tmp_path / "answered.jsonl").stat().st_size
    assert same(store.call("begin", 1, begin()), began)
    assert same(store.call("secrets", 1, secrets_of()), held)
    if adversary == "active":
        assert np.array_equal(store.call("sign", 1, reveal())["signed"], signed)
    assert same(store.call("reveal", 1, reveal(signed=signed)), revealed)
    assert (tmp_path / "answered.jsonl").stat().st_size == size


def test_a_round_is_answered_in_order_and_as_it_was_asked_first(tmp_path: Path) -> None:
    path = tmp_path / "answered.jsonl"
    store = KeyStore(Masked(), path)
    for round_index in (1, 2):
        store.call("begin", round_index, begin())
        store.call("secrets", round_index, secrets_of())
        store.call("reveal", round_index, reveal())
    with pytest.raises(PayloadError, match="asked for round 1, and are in round 2"):
        store.call("reveal", 1, reveal())
    with pytest.raises(PayloadError, match="round 1 comes before round 2, which clients have begun"):
        store.call("begin", 1, begin())
    with pytest.raises(PayloadError, match="asked for round 3, and are in round 2"):
        store.call("secrets", 3, secrets_of())

    later = KeyStore(Masked(), path)
    assert later.call("public", 0, {})["answered"].tolist() == [2]
    assert later.call("begin", 1, begin())["survivors"].tolist() == FIRST  # as it was: a resume from before round 1
    assert not same(later.call("secrets", 1, secrets_of()), store.call("secrets", 2, secrets_of())), "new keys"
    with pytest.raises(PayloadError, match="client 0 has been sent another model in round 1"):
        later.call("secrets", 1, secrets_of(model=MODEL + 1))
    for other in (FIRST[:-1], EVERYONE, [1, 2, 3, 4, 5, 6, 7, 8]):
        with pytest.raises(PayloadError, match="reveals nothing: it has answered for another list"):
            later.call("reveal", 1, reveal(other))
    later.call("reveal", 1, reveal())
    with pytest.raises(PayloadError, match="round 2 in another cohort, or with other groups"):
        later.call("begin", 2, begin(EVERYONE[:-1]))
    later.call("begin", 4, begin(EVERYONE[1:]))
    last = KeyStore(Masked(), path)
    assert last.call("begin", 2, begin())["survivors"].tolist() == FIRST
    with pytest.raises(PayloadError, match="round 3 comes before round 4, which clients have answered"):
        last.call("begin", 3, begin())
    assert last.call("begin", 4, begin(EVERYONE[1:]))["survivors"].tolist() == []
    assert last.call("begin", 5, begin())["survivors"].tolist() == []


def test_a_second_model_within_a_round_is_refused_and_signed_lists_tell_it() -> None:
    store = KeyStore(Masked(adversary="active"))
    store.call("begin", 1, begin())
    store.call("secrets", 1, secrets_of(EVERYONE[:5]))
    with pytest.raises(PayloadError, match="client 4 has been sent another model"):
        store.call("secrets", 1, secrets_of([4, 5], MODEL + 1))
    store.call("secrets", 1, secrets_of([5, 6, 7, 8, 9], MODEL + 1))
    signed = store.call("sign", 1, reveal())["signed"]
    with pytest.raises(PayloadError, match="another context"):
        store.call("reveal", 1, reveal(signed=signed))


@contextmanager
def noted(disk: RecordingDisk, answers: list[tuple[int, Any]], what: Any) -> Iterator[None]:
    """Note that an answer leaves after so many operations."""
    yield
    answers.append((len(disk.operations), what))


def test_no_answer_leaves_before_a_power_cut_that_forgets_it(tmp_path: Path) -> None:
    made, disk, answers = tmp_path / "made", RecordingDisk(), list[tuple[int, Any]]()
    made.mkdir()
    asked, accepted = {"clients": np.arange(3)}, {client: Accepted(frozenset([0, 2]), bytes(32)) for client in (0, 2)}
    with use_disk(disk):
        record = AnsweredRounds(made / "keys" / "answered.jsonl")
        for round_index in range(1, 4):
            with noted(disk, answers, (round_index, "cohort")):
                record.begin(round_index, asked)
            with noted(disk, answers, (round_index, "survivors")):
                record.accept(round_index, accepted)
            with noted(disk, answers, (round_index, "sum")):
                record.open(round_index, 0, [0, 2], {"integers": np.arange(3)})
    for after, rule in product(range(len(disk.operations) + 1), RULES):
        left = tmp_path / f"{after} {rule}"
        left.mkdir()
        crash_state(disk.operations, made, after, rule).write(left)
        found = AnsweredRounds(left / "keys" / "answered.jsonl")
        for left_after, (round_index, what) in answers:
            if left_after > after:
                continue
            if what == "cohort":
                with pytest.raises(PayloadError, match="in another cohort"):
                    found.begin(round_index, {"clients": np.arange(2)})
            elif what == "survivors":
                assert found.accepted(round_index) == accepted
                assert found.survivors(round_index) == {0, 2}
            else:
                with pytest.raises(PayloadError, match="has been opened before"):
                    found.open(round_index, 0, [0], {"integers": np.arange(3) + 1})
                found.open(round_index, 0, [0, 2], {"integers": np.arange(3)})


def test_what_was_not_synced_is_cut_and_other_damage_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "answered.jsonl"
    record = AnsweredRounds(path)
    for round_index in (1, 2, 3):
        record.begin(round_index, begin())
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"round": 4, "coh')
    assert AnsweredRounds(path).last == 3
    assert path.read_bytes() == whole
    lines = whole.splitlines(keepends=True)
    for damaged in (b"\n", b"3\n", b"[1]\n", b'{"round": "x"}\n', b'{"round": 2, "survivors": 3, "sum": ""}\n'):
        path.write_bytes(lines[0] + damaged + lines[2])
        with pytest.raises(UserError, match="is damaged, and what clients have answered is not known; start a new run"):
            AnsweredRounds(path)


def test_clients_answer_nothing_that_they_cannot_write_down(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = KeyStore(Masked(), tmp_path / "file" / "answered.jsonl")
    with pytest.raises(UserError, match=r"clients answer no round that they cannot write down: .*; remove what has"):
        store.call("begin", 1, begin())
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"cannot write down: .*folder"):
        KeyStore(Masked(), tmp_path / "folder").call("public", 0, {})


def test_after_a_full_disk_nothing_is_written_behind_half_a_line(tmp_path: Path) -> None:
    class Full(RecordingDisk):
        def append(self, path: Path, content: bytes) -> None:
            super().append(path, content[:9])
            raise OSError(28, "No space left on device")

    path = tmp_path / "answered.jsonl"
    record = AnsweredRounds(path)
    record.begin(1, begin())
    with use_disk(Full()), pytest.raises(UserError, match="No space left"):
        record.begin(2, begin())
    with pytest.raises(UserError, match="No space left"):
        record.begin(2, begin())
    assert AnsweredRounds(path).last == 1


def put_another_there(path: Path) -> None:
    path.rename(path.with_name("kept"))
    path.write_bytes(path.with_name("kept").read_bytes()[::-1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (Path.unlink, r"answered\.jsonl was removed: clients do not answer"),
        (lambda path: path.write_bytes(b""), r"was changed \(\d+ bytes were written, 0 are there\): clients"),
        (lambda path: path.write_bytes(path.read_bytes().splitlines(keepends=True)[0]), r"was changed \("),
        (lambda path: path.write_bytes(path.read_bytes() + b"{}\n"), r"was changed \("),
        (put_another_there, r"was changed \("),
    ],
)
@pytest.mark.parametrize("asked", ["the round in progress", "the next round"])
def test_clients_answer_nothing_more_if_their_record_is_not_what_they_wrote(
    asked: str, change: Any, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "answered.jsonl"
    store = KeyStore(Masked(), path)
    for round_index in (1, 2):
        store.call("begin", round_index, begin())
        store.call("secrets", round_index, secrets_of())
        if round_index == 1:
            store.call("reveal", 1, reveal())
    whole = path.read_bytes()
    change(path)
    ask = ("reveal", 2, reveal()) if asked == "the round in progress" else ("begin", 3, begin())
    for _ in range(2):
        with pytest.raises(UserError, match=said):
            store.call(*ask)
    path.write_bytes(whole)
    store.call(*ask)
    assert path.read_bytes().startswith(whole)
    assert len(path.read_bytes().splitlines()) == len(whole.splitlines()) + 1


def test_a_line_for_each_cohort_and_each_list_is_short(tmp_path: Path) -> None:
    path = tmp_path / "answered.jsonl"
    store = KeyStore(Masked(), path)
    store.call("begin", 1, begin())
    store.call("secrets", 1, secrets_of())
    store.call("reveal", 1, reveal() | {"asked": np.array(FIRST[:-1])})
    store.call("reveal", 1, reveal())
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [sorted(each) for each in entries] == [
        ["cohort", "round"],
        ["clients", "model", "round", "survivors"],
        ["clients", "model", "round", "survivors"],
    ]
    assert [each.get("clients") for each in entries] == [None, FIRST[:-1], FIRST[-1:]]


@pytest.mark.parametrize("keys", [None, "keys"])
def test_a_process_elsewhere_writes_the_same_record(
    keys: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key store of a cluster that was there before has the working directory of its node."""
    monkeypatch.chdir(tmp_path)
    Path("runs", "a").mkdir(parents=True)
    record = answered_file(Path("runs", "a"), keys)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    KeyStore(Masked(), record).call("begin", 1, begin())
    assert not list(Path().iterdir())
    monkeypatch.chdir(tmp_path)
    assert answered_file(Path("runs", "a"), keys) == record
    assert record.is_file()
