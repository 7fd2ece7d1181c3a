"""The journal of a run: one JSON line per round, written before the round is reported anywhere else.

Resumes, tables and late deliveries to MLflow are made from it. A round that is repeated after a resume has the same
results, so its first line is kept. The journal is synced before a checkpoint and before rounds are sent to MLflow.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from narrowcast.platform.disk import disk
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.links import own_file
from narrowcast.platform.outcome import CLIENT_METRICS as CLIENT_METRICS_KEY
from narrowcast.platform.step import ITERATION, ITERATION_COLUMNS, Step
from narrowcast.platform.tracking.client_tables import (
    client_metrics_blocks,
    client_metrics_schema,
    clients_blocks,
    clients_schema,
)
from narrowcast.platform.tracking.journal_lines import Lines, encoded, read_lines, step_name, step_of
from narrowcast.platform.tracking.metric_direction import Declared, is_better
from narrowcast.platform.types import Profiles, RoundLedger

logger = logging.getLogger(__name__)
_FILE = "journal.jsonl"
ROUNDS, CLIENTS, CLIENT_METRICS = "rounds.parquet", "clients.parquet", "client_metrics.parquet"


class AtWork(UserError):  # noqa: N818 - the error of a lock
    """Another process has the lock of a run."""


@contextmanager
def locked(folder: Path, file: str = _FILE) -> Iterator[None]:
    """Lock the run against every other process that would run or send it; raise `AtWork` if one has the lock.

    The lock is on `file`, which is created if it is missing.
    """
    path = own_file(folder, file)
    if not path.exists():
        disk().append(path, b"")
        disk().sync(folder)
    with path.open("ab") as held:
        _lock(held, folder, fcntl.LOCK_EX)
        yield


def has_journal(folder: Path) -> bool:
    """Return whether the folder has a journal, with which every process at work on a run locks it."""
    return (folder / _FILE).is_file()


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
            found = self.path.stat()
        except FileNotFoundError:
            if not self.lines.size:
                return
            changed = "was removed"
        else:
            same = found.st_size == self.lines.size
            if same and self._inode in (None, found.st_ino):
                return
            if same and Journal.read(self.path.parent).lines.checksum == self.lines.checksum:
                self._inode = found.st_ino  # put back, or on a file system that numbers its files anew
                return
            changed = f"was changed, and has {found.st_size:,} bytes where {self.lines.size:,} were written,"
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
        places = {}
        for name, (schema, blocks) in self._blocks(profiles).items():
            places[name] = self.path.with_name(name)
            disk().fill(places[name], partial(_write_blocks, schema, blocks))
        return places

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

    def best_metrics(self, declared: Declared = None) -> dict[str, dict[str, float]]:
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
