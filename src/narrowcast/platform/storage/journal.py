"""The journal of a run: one JSON line per round, written before the round is reported anywhere else.

Resumes, tables and late deliveries to MLflow are made from it. A line has a checksum that covers the line and all lines
before it. A round that is repeated after a resume has the same results, so its first line is kept. The journal is
synced before a checkpoint and before rounds are sent to MLflow. The tables of clients are made in blocks of rounds, so
that memory is bounded.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from narrowcast.platform.config.trust import own_file
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.rounds.ledger import RoundLedger
from narrowcast.platform.rounds.outcome import CLIENT_METRICS_KEY
from narrowcast.platform.storage.disk import disk
from narrowcast.platform.tracking.metrics import LowerIsBetter, is_better
from narrowcast.platform.types import ITERATION, ITERATION_COLUMNS, Profiles, Step

_KEYS, _OPTIONAL, _KEYS_OF_SOLVE = {"clients", "round"}, {"client_metrics"}, {ITERATION}
_NAME = b', "sha256": "'
_DIGITS = 64
_SUFFIX = len(_NAME) + _DIGITS + len(b'"}')


@dataclass
class Lines:
    """The intact lines at the beginning of a journal.

    Attributes:
        rows: the round or iteration of each line, without the clients' ledgers.
        size: the length of the lines in bytes.
        checksum: the checksum of the last line.
        problem: what is wrong with the line after them, empty if there is none.
        incomplete: True if that line is the last one and has no end.

    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    size: int = 0
    checksum: bytes = b""
    problem: str = ""
    incomplete: bool = False


def encoded(entry: Mapping[str, Any], before: bytes) -> tuple[bytes, bytes]:
    """Return the line of an entry, and its checksum: the sha256 of the checksum `before` it and the entry's JSON."""
    body = json.dumps(entry).encode()
    checksum = _checksum(before, body)
    return body[:-1] + _NAME + checksum + b'"}\n', checksum


def read_lines(stream: Iterable[bytes]) -> Lines:
    """Return the lines of a file up to the first that is not intact or not of the next round or a later iteration."""
    lines = Lines()
    for number, line in enumerate(stream, start=1):
        if not line.endswith(b"\n"):
            lines.problem, lines.incomplete = f"line {number} is incomplete", True
            return lines
        try:
            body, written = _parted(line[:-1])
            row = _row(body, lines.rows)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            lines.problem = f"line {number}: {error}"
            return lines
        checksum = _checksum(lines.checksum, body)
        if written != checksum:
            lines.problem = f"line {number}: its checksum is not that of the lines up to it"
            return lines
        lines.rows.append(row)
        lines.size, lines.checksum = lines.size + len(line), checksum
    return lines


def _row(body: bytes, before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    entry = json.loads(body)
    if set(entry) == _KEYS_OF_SOLVE:
        row: dict[str, Any] = entry[ITERATION]
        if row[ITERATION] <= (before[-1][ITERATION] if before else 0):
            raise ValueError("an iteration is repeated")
        return row
    if set(entry) - _OPTIONAL != _KEYS:
        raise ValueError("not a round with its clients")
    row = entry["round"]
    if row["round"] != len(before) + 1:
        raise ValueError("a round is missing")
    return row


def step_name(row: Mapping[str, Any]) -> str:
    """Return the name of the column that numbers the rows: `round`, or `iteration` in the journal of a solve."""
    return "round" if "round" in row else ITERATION


def step_of(row: Mapping[str, Any]) -> int:
    """Return the round of a row, or its iteration in the journal of a solve."""
    step: int = row[step_name(row)]
    return step


def _parted(line: bytes) -> tuple[bytes, bytes]:
    """Return the JSON that a checksum covers, and the checksum; raise `ValueError` if the line has none."""
    suffix = line[-_SUFFIX:]
    if not (suffix.startswith(_NAME) and suffix.endswith(b'"}')):
        raise ValueError("it has no checksum")
    return line[:-_SUFFIX] + b"}", suffix[len(_NAME) : -2]


def _checksum(before: bytes, body: bytes) -> bytes:
    return hashlib.sha256(before + body).hexdigest().encode()


ROWS_AT_ONCE = 50_000
"""Rows of a block, but for those of its last round."""
_FLOATS, _FLAGS = {"seconds", "loss", "uplink_bits_per_second"}, {"delivered", "late"}
Entry = Mapping[str, Any]


def clients_schema(columns: Iterable[str], metrics: Iterable[str]) -> pa.Schema:
    """Return the schema of `clients_blocks`, from the columns of a ledger and the metrics of clients."""
    names = ("round", *columns, "uplink_bits_per_second", *metrics)
    floats = {*_FLOATS, *metrics}
    types = [pa.float64() if name in floats else pa.bool_() if name in _FLAGS else pa.int64() for name in names]
    return pa.schema(zip(names, types, strict=True))


def clients_blocks(entries: Iterable[Entry], schema: pa.Schema, profiles: Profiles) -> Iterator[pa.Table]:
    """Yield blocks of one row per participation of a client in a round, with the client's uplink rate.

    Metrics of the client are those after the round, null in rounds without an evaluation of clients.
    """
    for block in _blocks(entries, lambda entry: len(entry["clients"]["client"])):
        yield pa.Table.from_arrays([_column(name, block, profiles, schema) for name in schema.names], schema=schema)


def _column(name: str, block: Sequence[Entry], profiles: Profiles, schema: pa.Schema) -> pa.Array:
    clients = [entry["clients"]["client"] for entry in block]
    if name == "round":
        return pa.array(np.repeat([entry["round"]["round"] for entry in block], [len(client) for client in clients]))
    if name == "uplink_bits_per_second":
        return pa.array(profiles.uplink_bits_per_second[[client for of_round in clients for client in of_round]])
    if name in block[0]["clients"]:
        return pa.array((value for entry in block for value in entry["clients"][name]), schema.field(name).type)
    measured = [entry.get(CLIENT_METRICS_KEY, {}).get(name) for entry in block]
    values = (
        None if of_all is None else of_all[client]
        for of_all, chosen in zip(measured, clients, strict=True)
        for client in chosen
    )
    return pa.array(values, pa.float64())


def client_metrics_schema(metrics: Iterable[str]) -> pa.Schema:
    """Return the schema of `client_metrics_blocks`."""
    return pa.schema([("round", pa.int64()), ("client", pa.int64()), *((name, pa.float64()) for name in metrics)])


def client_metrics_blocks(entries: Iterable[Entry], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield blocks of one row per client and evaluated round, for all clients."""
    evaluated = (entry for entry in entries if CLIENT_METRICS_KEY in entry)
    for block in _blocks(evaluated, _n_measured):
        sizes = [_n_measured(entry) for entry in block]
        columns = [
            pa.array(np.repeat([entry["round"]["round"] for entry in block], sizes)),
            pa.array(np.concatenate([np.arange(size) for size in sizes])),
        ]
        for name in schema.names[2:]:
            parts = (
                entry[CLIENT_METRICS_KEY].get(name, [None] * size) for entry, size in zip(block, sizes, strict=True)
            )
            columns.append(pa.array((value for part in parts for value in part), pa.float64()))
        yield pa.Table.from_arrays(columns, schema=schema)


def _n_measured(entry: Entry) -> int:
    return len(next(iter(entry[CLIENT_METRICS_KEY].values())))


def _blocks(entries: Iterable[Entry], n_rows: Callable[[Entry], int]) -> Iterator[list[Entry]]:
    block: list[Entry] = []
    rows = 0
    for entry in entries:
        block.append(entry)
        rows += n_rows(entry)
        if rows >= ROWS_AT_ONCE:
            yield block
            block, rows = [], 0
    if block:
        yield block


logger = logging.getLogger(__name__)
_FILE, STUDY_LOCK = "journal.jsonl", "study.lock"
"""The files on which every process at work on a run, and on a study, has a lock."""
ROUNDS, CLIENTS, CLIENT_METRICS = "rounds.parquet", "clients.parquet", "client_metrics.parquet"


class AtWork(UserError):  # noqa: N818 - the error of a lock
    """Another process has the lock of a run."""


@contextmanager
def locked(folder: Path, file: str = _FILE) -> Iterator[None]:
    """Lock the run against every other process that would run or send it; raise `AtWork` if one has the lock.

    The lock is on `file`, which is created if it is missing.
    """
    with _created(folder, file).open("ab") as held:
        _lock(held, folder, fcntl.LOCK_EX)
        yield


@contextmanager
def working_on_study(folder: Path) -> Iterator[None]:
    """Lock the study within the block, which several processes may do at once."""
    with _created(folder, STUDY_LOCK).open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        yield


def _created(folder: Path, file: str) -> Path:
    path = own_file(folder, file)
    if not path.exists():
        disk().append(path, b"")
        disk().sync(folder)
    return path


def is_left(folder: Path) -> bool:
    """Return whether processes have been at work on the run or the study of a folder, and none is."""
    files = [path for name in (_FILE, STUDY_LOCK) if (path := folder / name).is_file()]
    try:
        for path in files:
            with path.open("rb") as held:
                _lock(held, folder, fcntl.LOCK_EX)
    except (AtWork, OSError):
        return False
    return bool(files)


@contextmanager
def read_locked(folder: Path) -> Iterator[None]:
    """Keep the run from being written within the block; raise `AtWork` if a process is at work on it."""
    path = folder / _FILE
    if not path.exists():
        yield
        return
    with path.open("rb") as held:
        _lock(held, folder, fcntl.LOCK_SH)
        yield


def _lock(held: IO[bytes], folder: Path, kind: int) -> None:
    try:
        fcntl.flock(held, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise AtWork(f"another process is at work on {folder}; wait until it ends, or stop it") from None


@dataclass
class Journal:
    """The rounds of a run so far, as flat rows; the ledgers of their clients stay on disk to save memory."""

    path: Path
    lines: Lines = field(default_factory=Lines)
    _synced_rounds: int = 0
    _failure: OSError | None = None
    _inode: int | None = None
    """The inode of the file that this process has written; None before it has written any."""

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The rows of the rounds, a list that grows."""
        return self.lines.rows

    @property
    def last_step(self) -> int:
        """The last round or iteration in the journal, 0 if there is none."""
        return step_of(self.rounds[-1]) if self.rounds else 0

    @classmethod
    def open(cls, folder: Path, settled: int | None = None) -> Journal:
        """Read the journal of a run, empty if there is none, and remove a last line that a crash cut short.

        With `settled`, a round from which the run can be resumed, all that is damaged after that round is removed: a
        power cut may damage what was not synced. Raise `UserError` for any other damage.
        """
        journal = cls.read(folder)
        lines = journal.lines
        if not lines.problem:
            return journal
        if not (lines.incomplete if settled is None else journal.last_step >= settled):
            raise UserError(f"{journal.path} is damaged ({lines.problem}); start the run again")
        logger.warning(
            "%s: %s; the %ss after %d are repeated", journal.path, lines.problem, journal.step_name, journal.last_step
        )
        disk().truncate(journal.path, lines.size)
        return journal

    @classmethod
    def read(cls, folder: Path) -> Journal:
        """Read the intact rounds of a run's journal, and change nothing."""
        path = own_file(folder, _FILE)
        if not path.exists():
            return cls(path)
        with path.open("rb") as stream:
            return cls(path, read_lines(stream))

    @property
    def step_name(self) -> str:
        """The name of the column that numbers the rows, `round` or `iteration`."""
        return step_name(self.rounds[-1]) if self.rounds else "round"

    def row_of(self, step: int) -> dict[str, Any]:
        """Return the row of a round or iteration that the journal has, which is mostly the last one."""
        return next(row for row in reversed(self.rounds) if step_of(row) == step)

    @property
    def extent(self) -> str:
        """The last intact round, in words for an error."""
        damaged = f" and is damaged there ({self.lines.problem})" if self.lines.problem else ""
        return f"{self.path} ends at {self.step_name} {self.last_step}{damaged}"

    def append(self, outcome: Step, logged_at_ms: int, log_seconds: float = 0.0) -> bool:
        """Write a round or an iteration unless the journal has it; return whether it was written.

        `log_seconds`: the time that recording the round before took, checkpoint included. Raise `RunFailed` if somebody
        has removed or changed the file since the last one.
        """
        if outcome.step <= self.last_step:
            return False
        self.check_file()
        wall_seconds = self.rounds[-1]["wall_seconds"] if self.rounds else 0.0
        row = {
            **outcome.row(),
            "wall_seconds": wall_seconds + outcome.wall_seconds,
            "log_wall_seconds": log_seconds,
            "logged_at_ms": logged_at_ms,
            **outcome.metrics,
        }
        line, checksum = encoded(outcome.entry(row), self.lines.checksum)
        disk().append(self.path, line)
        self.rounds.append(row)
        self.lines.size, self.lines.checksum = self.lines.size + len(line), checksum
        if self._inode is None:
            self._inode = self.path.stat().st_ino
        return True

    def check_file(self) -> None:
        """Raise `RunFailed` if the file is not what was written: what is appended to another one is lost.

        To be called by the thread that appends.
        """
        try:
            status = self.path.stat()
        except FileNotFoundError:
            if not self.lines.size:
                return
            changed = "was removed"
        else:
            same_size = status.st_size == self.lines.size
            if same_size and self._inode in (None, status.st_ino):
                return
            if same_size and Journal.read(self.path.parent).lines.checksum == self.lines.checksum:
                self._inode = status.st_ino  # put back, or on a file system that numbers its files anew
                return
            changed = f"was changed, and has {status.st_size:,} bytes where {self.lines.size:,} were written,"
        raise RunFailed(
            f"{self.path} {changed} while the run was at work; put it back if you can, then resume the run, which "
            "needs the journal up to one of its checkpoints; otherwise start it again"
        )

    def sync(self) -> None:
        """Make all rounds survive a power cut; raise `OSError`, from then on at each call.

        After a failure the kernel may drop the data that it could not write, and report the next attempt as a success.
        """
        if self._failure is not None:
            raise self._failure
        if (rounds := len(self.rounds)) > self._synced_rounds:
            try:
                disk().sync(self.path)
            except OSError as error:
                self._failure = error
                raise
            self._synced_rounds = rounds

    def entries(self) -> Iterator[dict[str, Any]]:
        """Yield the intact lines, read from the disk: each with its round, its clients' ledger and their metrics."""
        for number, line in enumerate(self._intact_lines(), start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise RunFailed(f"{self.path}: line {number} was changed while it was in use ({error})") from error

    def _intact_lines(self) -> Iterator[bytes]:
        if self._inode is not None:
            self.check_file()
        if self.rounds:
            with self.path.open("rb") as stream:
                yield from islice(stream, len(self.rounds))

    def ledgers(self, rounds: Container[int] | None = None) -> Iterator[dict[str, list[Any]]]:
        """Yield the clients' ledgers of these rounds, or of all, as columns, read from the disk."""
        for entry in self.entries():
            if rounds is None or entry["round"]["round"] in rounds:
                yield entry["clients"]

    def rounds_table(self) -> pa.Table:
        """Return one row per round; metrics are null in rounds that were not evaluated."""
        columns = dict.fromkeys(name for row in self.rounds for name in row)
        return pa.table({name: [row.get(name) for row in self.rounds] for name in columns})

    def tables(self, profiles: Profiles) -> dict[str, pa.Table]:
        """Return the tables of a run by their file: `ROUNDS`, `CLIENTS`, and `CLIENT_METRICS` if there are any."""
        return {
            name: pa.concat_tables([schema.empty_table(), *blocks])
            for name, (schema, blocks) in self._blocks(profiles).items()
        }

    def write_tables(self, profiles: Profiles) -> dict[str, Path]:
        """Write the tables to the run's folder and return their paths by the same names.

        Those of the clients are written block by block, since a large run's do not fit into memory.
        """
        paths = {}
        for name, (schema, blocks) in self._blocks(profiles).items():
            paths[name] = self.path.with_name(name)
            disk().write_with(paths[name], partial(_write_blocks, schema, blocks))
        return paths

    def _blocks(self, profiles: Profiles) -> dict[str, tuple[pa.Schema, Iterable[pa.Table]]]:
        """Return the schema and the blocks of each table; blocks are made when they are asked for."""
        rounds = self.rounds_table()
        first = next(self.entries(), None)
        columns = list(RoundLedger.__annotations__) if first is None else list(first["clients"])
        metrics = self._client_metrics()
        of_clients = clients_schema(columns, metrics)
        blocks: dict[str, tuple[pa.Schema, Iterable[pa.Table]]] = {
            ROUNDS: (rounds.schema, [rounds]),
            CLIENTS: (of_clients, clients_blocks(self.entries(), of_clients, profiles)),
        }
        if metrics:
            schema = client_metrics_schema(metrics)
            blocks[CLIENT_METRICS] = schema, client_metrics_blocks(self.entries(), schema)
        return blocks

    def _client_metrics(self) -> list[str]:
        """Return the names of the metrics of clients in any round; few lines have any, and only those are parsed."""
        key = f'"{CLIENT_METRICS_KEY}": '.encode()
        entries = (json.loads(line) for line in self._intact_lines() if key in line)
        return list(dict.fromkeys(name for entry in entries for name in entry.get(CLIENT_METRICS_KEY, ())))

    def final_metrics(self) -> dict[str, float]:
        """Return the finite ones of the last metrics and of the training loss of the last round."""
        metrics: dict[str, float] = {}
        for row in self.rounds:
            metrics |= evaluation(row)
        if self.rounds and "loss" in self.rounds[-1]:
            metrics["loss"] = self.rounds[-1]["loss"]
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def best_metrics(self, declared: LowerIsBetter = None) -> dict[str, dict[str, float]]:
        """Return the best value of each metric and the first round that had it; the lowest of a loss.

        `declared`: the metrics that the model declares as better when lower.
        """
        best: dict[str, dict[str, float]] = {}
        for row in self.rounds:
            for name, value in evaluation(row).items():
                if name not in best or is_better(name, value, best[name]["value"], declared):
                    best[name] = {"value": value, step_name(row): step_of(row)}
        return best


def evaluation(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries of a row that an evaluation measured: in that of a round, those with a dot in their name."""
    if ITERATION in row:
        return {name: value for name, value in row.items() if name not in ITERATION_COLUMNS}
    return {name: value for name, value in row.items() if "." in name}


def _write_blocks(schema: pa.Schema, blocks: Iterable[pa.Table], path: Path) -> None:
    with pq.ParquetWriter(path, schema) as writer:
        for block in blocks:
            writer.write_table(block)
