"""The journal: what is written is read back, cut-off lines go, and the tables are made from it."""

from __future__ import annotations

import json
import math
import os
import random
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.rounds.ledger import RoundLedger, RoundRecord
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.storage import journal
from narrowcast.platform.storage import journal as client_tables
from narrowcast.platform.storage.disk import Disk, use_disk
from narrowcast.platform.storage.journal import Journal
from narrowcast.platform.types import Profiles

FILE = "journal.jsonl"
HIT_RATES = {2: 0.5, 4: 0.75, 6: 0.625}
ROUND_COLUMNS = {
    "round": pa.int64(),
    "clients": pa.int64(),
    "delivered": pa.int64(),
    "late": pa.int64(),
    "loss": pa.float64(),
    "mean_rank": pa.float64(),
    "mean_staleness": pa.float64(),
    "uplink_bits": pa.int64(),
    "downlink_bits": pa.int64(),
    "total_uplink_bits": pa.int64(),
    "total_downlink_bits": pa.int64(),
    "total_bits": pa.int64(),
    "round_simulated_seconds": pa.float64(),
    "simulated_seconds": pa.float64(),
    "clipped_share": pa.float64(),
    "allocation_bits": pa.int64(),
    "touched_bits": pa.int64(),
    "round_wall_seconds": pa.float64(),
    "wall_seconds": pa.float64(),
    **{
        f"{part}_wall_seconds": pa.float64()
        for part in ("broadcast", "train", "encode", "aggregate", "evaluate", "log")
    },
    "logged_at_ms": pa.int64(),
    "validation.hr@10": pa.float64(),
    "test.hr@10": pa.float64(),
}
CLIENT_COLUMNS = {
    "round": pa.int64(),
    "client": pa.int64(),
    "rank": pa.int64(),
    "uplink_bits": pa.int64(),
    "downlink_bits": pa.int64(),
    "examples": pa.int64(),
    "seconds": pa.float64(),
    "loss": pa.float64(),
    "delivered": pa.bool_(),
    "late": pa.bool_(),
    "staleness": pa.int64(),
    "uplink_bits_per_second": pa.float64(),
}


def outcome(number: int, wall_seconds: float = 0.25, loss: float | None = None) -> Outcome:
    record = RoundRecord(
        round=number,
        clients=2,
        delivered=1,
        late=0,
        loss=1 / number if loss is None else loss,
        mean_rank=1.5,
        mean_staleness=0.5,
        uplink_bits=30,
        downlink_bits=70,
        total_uplink_bits=2**53 + number,  # no double holds it
        total_downlink_bits=70 * number,
        total_bits=2**53 + 71 * number,
        round_simulated_seconds=0.1,
        simulated_seconds=0.1 * number,
        clipped_share=0.25,
    )
    ledger = RoundLedger(
        client=np.array([number % 3, 3]),
        rank=np.array([1, 2]),
        uplink_bits=np.array([10, 20]),
        downlink_bits=np.array([70, 0]),
        examples=np.array([5, 6]),
        seconds=np.array([0.1, 0.05]),
        loss=np.array([0.5, np.nan]),
        delivered=np.array([True, False]),
        late=np.array([False, True]),
        staleness=np.array([0, 1]),
    )
    rate = HIT_RATES.get(number)
    metrics = {} if rate is None else {"validation.hr@10": 1 - rate, "test.hr@10": rate}
    return Outcome(record, ledger, metrics, wall_seconds, state=None)


def filled(folder: Path, rounds: int = 6) -> Journal:
    journal = Journal.open(folder)
    for number in range(1, rounds + 1):
        assert journal.append(outcome(number), logged_at_ms=1_700_000_000_000 + number)
    return journal


def profiles() -> Profiles:
    rates = np.array([1e6, 2e6, 3e6, 4e6])
    return Profiles(np.arange(4), np.full(4, 9), rates, 10 * rates, np.ones(4))


def test_an_opened_journal_is_the_one_that_was_written(tmp_path: Path) -> None:
    assert Journal.open(tmp_path).last_step == 0
    assert not (tmp_path / FILE).exists()
    written = filled(tmp_path)
    opened = Journal.open(tmp_path)
    assert opened.rounds == written.rounds
    assert json.dumps(list(opened.ledgers())) == json.dumps(list(written.ledgers()))  # nan is not equal to itself
    assert opened.last_step == 6
    assert opened.rounds[4]["total_uplink_bits"] == 2**53 + 5
    assert opened.rounds[4]["logged_at_ms"] == 1_700_000_000_005
    assert [row["wall_seconds"] for row in opened.rounds] == [0.25 * number for number in range(1, 7)]
    assert opened.append(outcome(7, wall_seconds=1.0), logged_at_ms=0)
    assert Journal.open(tmp_path).rounds[-1]["wall_seconds"] == 2.5


def test_a_last_line_that_was_cut_off_is_dropped_and_written_anew(tmp_path: Path) -> None:
    whole = filled(tmp_path, rounds=3)
    path = tmp_path / FILE
    content = path.read_bytes()
    end_of_second = content[:-1].rfind(b"\n") + 1
    for cut in range(end_of_second, len(content)):
        path.write_bytes(content[:cut])
        journal = Journal.open(tmp_path)
        assert journal.rounds == whole.rounds[:2]
        assert path.read_bytes() == content[:end_of_second]
    assert journal.append(outcome(3), logged_at_ms=1_700_000_000_003)
    assert path.read_bytes() == content


@pytest.mark.parametrize("rest", [b"{\xff\xfe", '{"round": {"x": "é'.encode()[:-1], b"\x00\x00"])
def test_a_cut_off_line_need_not_be_text(tmp_path: Path, rest: bytes) -> None:
    filled(tmp_path, rounds=2)
    with (tmp_path / FILE).open("ab") as stream:
        stream.write(rest)
    assert Journal.open(tmp_path).last_step == 2


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"7",
        b'"text"',
        b"{}",
        b'{"round": {}}',
        b'{"clients": {}}',
        b'{"round": {}, "clients": {}}',
        b"\xff\xfe",
        b"\x00",
    ],
)
@pytest.mark.parametrize("line", [0, 1])
def test_a_damaged_line_is_an_error_and_is_left_alone(tmp_path: Path, line: int, damaged: bytes) -> None:
    filled(tmp_path, rounds=3)
    path = tmp_path / FILE
    lines = path.read_bytes().split(b"\n")
    lines[line] = damaged
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(UserError, match=r"journal.jsonl is damaged \(.+\); start the run again") as caught:
        Journal.open(tmp_path)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == b"\n".join(lines)


def test_a_lost_line_is_an_error(tmp_path: Path) -> None:
    filled(tmp_path, rounds=3)
    path = tmp_path / FILE
    first, _, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + third)
    with pytest.raises(UserError, match=r"is damaged \(line 2: a round is missing\)"):
        Journal.open(tmp_path)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The content after damage of some kind, or after the work of a careless editor."""
    start = rng.randrange(len(content))
    end = min(len(content), start + rng.choice((1, 2, 8, 100, 1000)))
    lines = content.splitlines(keepends=True)
    first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
    swapped = [*lines]
    swapped[first], swapped[second] = lines[second], lines[first]
    flipped = bytes([content[start] ^ (1 << rng.randrange(8))])
    return rng.choice(
        (
            content[:start] + flipped + content[start + 1 :],
            content[:start] + rng.choice(b"0123456789").to_bytes() + content[start + 1 :],
            content[:start] + content[end:],
            content[:start] + bytes(end - start) + content[end:],
            content[:start] + rng.randbytes(end - start) + content[end:],
            content[:end] + content[start:],
            content[:start] + content[start:end].replace(b"0", b"1") + content[end:],
            content[:start],
            b"".join(swapped),
            b"".join(lines[:first] + lines[first + 1 :]),
            b"".join([*lines[:first], lines[second], *lines[first + 1 :]]),
        )
    )


def accepted(folder: Path, content: bytes, mutations: int) -> int:
    """Return how many mutations are opened with other rounds than were written; raise what is no `UserError`."""
    path, count, rng = folder / FILE, 0, random.Random(0)
    path.write_bytes(content)
    written = contents(Journal.open(folder))
    for _ in range(mutations):
        path.write_bytes(mutated(content, rng))
        with suppress(UserError):
            opened = contents(Journal.open(folder, rng.choice((None, 3))))
            count += opened != written[: len(opened)]
    return count


def contents(journal: Journal) -> list[str]:
    return [json.dumps(entry) for entry in zip(journal.rounds, journal.ledgers(), strict=True)]


@pytest.mark.slow
def test_of_2000_mutations_none_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is opened is the beginning of what was written: a journal that is cut between lines cannot be told."""
    filled(tmp_path, rounds=12)
    content = (tmp_path / FILE).read_bytes()
    assert accepted(tmp_path, content, 2000) == 0
    with pytest.raises(UserError, match=r"is damaged \(line 1: it has no checksum\)"):
        (tmp_path / FILE).write_bytes(content.replace(b', "sha256": "', b', "sum": "'))
        Journal.open(tmp_path)
    (tmp_path / FILE).unlink()
    monkeypatch.setattr(journal, "_checksum", lambda before, body: b"0" * 64)  # noqa: ARG005
    filled(tmp_path, rounds=12)
    unprotected = (tmp_path / FILE).read_bytes()
    assert accepted(tmp_path, unprotected, 200) > 20, "the mutations are harmless, so the test says nothing"


def test_what_is_damaged_after_a_checkpoint_is_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path, rounds=6)
    path = tmp_path / FILE
    content = path.read_bytes()
    end_of_fourth = len(b"".join(content.splitlines(keepends=True)[:4]))
    damaged = content[: end_of_fourth + 9] + bytes(20) + content[end_of_fourth + 29 :]
    path.write_bytes(damaged)
    for settled in (None, 5, 6):
        with pytest.raises(UserError, match=r"is damaged \(line 5: .+\); start the run again"):
            Journal.open(tmp_path, settled)
    assert path.read_bytes() == damaged
    journal = Journal.open(tmp_path, 4)
    assert journal.last_step == 4
    assert "the rounds after 4 are repeated" in caplog.text
    for number in (5, 6):
        journal.append(outcome(number), logged_at_ms=1_700_000_000_000 + number)
    assert path.read_bytes() == content


def _removed(path: Path) -> None:
    path.unlink()


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


def _of_another_writer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x\n")


def _replaced(path: Path) -> None:
    content = path.read_bytes()
    path.rename(path.with_name("moved"))
    path.write_bytes(content[:-9] + b"0" + content[-8:])


@pytest.mark.parametrize("change", [_removed, _cut, _emptied, _of_another_writer, _replaced])
def test_a_journal_that_was_changed_under_its_writer_ends_it(change: Callable[[Path], None], tmp_path: Path) -> None:
    journal = filled(tmp_path, rounds=2)
    change(journal.path)
    said = (
        f"{journal.path} was (removed|changed, and has .* bytes where .* were written,) while the run was at work; put"
    )
    for call in (lambda: journal.append(outcome(3), 5), journal.check_file, lambda: journal.write_tables(profiles())):
        with pytest.raises(RunFailed, match=said):
            call()
    assert len(journal.rounds) == 2


def test_a_journal_that_was_moved_and_put_back_goes_on(tmp_path: Path) -> None:
    journal = filled(tmp_path, rounds=2)
    copy = tmp_path / "copy"
    copy.write_bytes(journal.path.read_bytes())
    copy.replace(journal.path)
    journal.append(outcome(3), 5)
    assert Journal.open(tmp_path).rounds == journal.rounds


class BrokenDisk(Disk):
    """A disk that cannot write a file back once, and then says that all is well, as kernels do."""

    syncs = 0

    def sync(self, path: Path) -> None:
        self.syncs += 1
        if self.syncs == 1:
            raise OSError(5, "Input/output error", str(path))


def test_a_sync_that_failed_once_is_not_believed_again(tmp_path: Path) -> None:
    journal = filled(tmp_path, rounds=2)
    with use_disk(BrokenDisk()):
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output error"):
                journal.sync()


def test_a_round_that_is_played_again_keeps_its_first_line(tmp_path: Path) -> None:
    filled(tmp_path, rounds=4)
    before = (tmp_path / FILE).read_bytes()
    journal = Journal.open(tmp_path)
    for number in (3, 4):
        assert not journal.append(outcome(number, wall_seconds=9.0), logged_at_ms=0)
    assert (tmp_path / FILE).read_bytes() == before
    assert journal.append(outcome(5), logged_at_ms=0)
    assert journal.rounds[-1]["wall_seconds"] == 1.25
    assert [row["round"] for row in Journal.open(tmp_path).rounds] == [1, 2, 3, 4, 5]


def test_the_tables_have_a_row_a_round_and_a_row_a_client(tmp_path: Path) -> None:
    journal = filled(tmp_path)
    places = journal.write_tables(profiles())
    assert places == {name: tmp_path / name for name in ("rounds.parquet", "clients.parquet")}
    rounds, clients = map(pq.read_table, places.values())
    assert dict(zip(rounds.column_names, rounds.schema.types, strict=True)) == ROUND_COLUMNS
    assert rounds["test.hr@10"].to_pylist() == [None, 0.5, None, 0.75, None, 0.625]
    assert rounds["total_uplink_bits"].to_pylist() == [2**53 + number for number in range(1, 7)]
    assert all(rounds[name].null_count == (3 if "." in name else 0) for name in ROUND_COLUMNS)

    stored = pq.read_table(tmp_path / "clients.parquet")
    assert stored.schema == clients.schema
    assert dict(zip(stored.column_names, stored.schema.types, strict=True)) == CLIENT_COLUMNS
    assert stored["round"].to_pylist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert stored["client"].to_pylist() == [1, 3, 2, 3, 0, 3, 1, 3, 2, 3, 0, 3]
    assert stored["uplink_bits_per_second"].to_pylist()[:6] == [2e6, 4e6, 3e6, 4e6, 1e6, 4e6]
    assert stored["delivered"].to_pylist() == 6 * [True, False]
    assert all(column.null_count == 0 for column in stored.columns)
    assert np.isnan(stored["loss"].to_numpy()[1::2]).all()


@pytest.mark.slow
def test_the_tables_of_a_large_run_take_no_more_memory_than_those_of_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_tables, "ROWS_AT_ONCE", 300)
    peaks = []
    for rounds in (50, 400):
        (tmp_path / str(rounds)).mkdir()
        journal = Journal.open(tmp_path / str(rounds))
        ones = np.ones(100, dtype=np.int64)
        for number in range(1, rounds + 1):
            floats, flags, clients = number * np.ones(100), np.ones(100, dtype=bool), np.arange(100)
            ledger = RoundLedger(clients, ones, ones, ones, ones, floats, floats, flags, ~flags, ones)
            evaluated = {"test.loss": floats + clients} if number % 2 else {}
            each = replace(outcome(number), ledger=ledger, client_metrics=evaluated)
            journal.append(each, logged_at_ms=0)
        many = Profiles(np.ones(100), np.ones(100), np.ones(100), np.ones(100), np.ones(100))
        tracemalloc.start()
        places = journal.write_tables(many)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        clients, metrics = (pq.read_table(places[name]) for name in ("clients.parquet", "client_metrics.parquet"))
        assert clients["round"].to_pylist() == [number for number in range(1, rounds + 1) for _ in range(100)]
        assert clients["test.loss"].to_pylist()[99:101] == [100.0, None]
        assert clients["seconds"].to_pylist()[-1] == rounds
        assert metrics["test.loss"].to_pylist()[-1] == rounds - 1 + 99
        assert metrics.num_rows == clients.num_rows / 2
        assert journal.tables(many)["clients.parquet"].equals(clients)
    assert peaks[1] < 1.5 * peaks[0]


def test_the_best_is_the_highest_and_the_final_the_last_that_was_measured(tmp_path: Path) -> None:
    journal = filled(tmp_path, rounds=7)
    assert journal.best_metrics() == {
        "validation.hr@10": {"value": 0.5, "round": 2},
        "test.hr@10": {"value": 0.75, "round": 4},
    }
    assert journal.final_metrics() == {"validation.hr@10": 0.375, "test.hr@10": 0.625, "loss": 1 / 7}


def test_the_best_loss_is_the_lowest(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    for number, loss in enumerate((2.0, 0.5, 0.9), start=1):
        each = outcome(number)
        journal.append(Outcome(each.record, each.ledger, {"test.loss": loss}, 0.1, None), logged_at_ms=0)
    assert journal.best_metrics() == {"test.loss": {"value": 0.5, "round": 2}}


def test_the_first_of_equally_good_rounds_is_the_best(tmp_path: Path) -> None:
    journal = filled(tmp_path, rounds=2)
    again = outcome(3)
    journal.append(Outcome(again.record, again.ledger, {"test.hr@10": 0.5}, 0.1, None), logged_at_ms=0)
    assert journal.best_metrics()["test.hr@10"] == {"value": 0.5, "round": 2}


def test_an_empty_journal_has_neither_best_nor_final(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    assert (journal.best_metrics(), journal.final_metrics()) == ({}, {})


def test_a_round_in_which_nobody_delivered_is_kept(tmp_path: Path) -> None:
    Journal.open(tmp_path).append(outcome(1, loss=math.nan), logged_at_ms=0)
    journal = Journal.open(tmp_path)
    assert math.isnan(journal.rounds[0]["loss"])
    assert math.isnan(journal.rounds_table()["loss"][0].as_py())
