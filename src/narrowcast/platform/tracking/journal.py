"""The journal of a run: one JSON line per round, written before the round is reported anywhere else.

Resumes, tables and late deliveries to MLflow are made from it. A round that is repeated after a resume has the same
results, so its first line is kept.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from narrowcast.platform.disk import disk
from narrowcast.platform.errors import UserError
from narrowcast.platform.outcome import Outcome
from narrowcast.platform.tracking.metric_direction import is_better
from narrowcast.platform.types import Profiles

_FILE = "journal.jsonl"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the run against every other process that would run or send it; raise `UserError` if one has the lock."""
    path = folder / _FILE
    if not path.exists():
        disk().append(path, b"")
        disk().sync(folder)
    with path.open("ab") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is at work on {folder}; wait until it ends, or stop it") from None
        yield


@dataclass
class Journal:
    """The rounds of a run so far, as flat rows; the ledgers of their clients stay on disk to save memory."""

    path: Path
    rounds: list[dict[str, Any]] = field(default_factory=list)

    @property
    def last_round(self) -> int:
        """The last round in the journal, 0 if there is none."""
        return self.rounds[-1]["round"] if self.rounds else 0

    @classmethod
    def open(cls, folder: Path) -> Journal:
        """Read the journal of a run, empty if there is none; a line that a crash cut short is removed."""
        journal = cls(folder / _FILE)
        if journal.path.exists():
            content = journal.path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if whole != content:
                disk().truncate(journal.path, len(whole))
            try:
                for line in whole.splitlines():
                    entry = json.loads(line)
                    row, _ = entry["round"], entry["clients"]
                    journal.rounds.append(row)
                numbers = [row["round"] for row in journal.rounds]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{journal.path} is damaged ({error}); start the run again") from error
            if numbers != list(range(1, len(numbers) + 1)):
                raise UserError(f"{journal.path} is damaged (a round is missing); start the run again")
        return journal

    def append(self, outcome: Outcome, logged_at_ms: int, log_seconds: float = 0.0) -> bool:
        """Write a round unless the journal has it; return whether it was written.

        `log_seconds`: the time that recording the round before took, checkpoint included.
        """
        if outcome.record.round <= self.last_round:
            return False
        wall_seconds = self.rounds[-1]["wall_seconds"] if self.rounds else 0.0
        row = {
            **asdict(outcome.record),
            "round_wall_seconds": outcome.wall_seconds,
            "wall_seconds": wall_seconds + outcome.wall_seconds,
            **{f"{part}_wall_seconds": seconds for part, seconds in vars(outcome.timing).items()},
            "log_wall_seconds": log_seconds,
            "logged_at_ms": logged_at_ms,
            **outcome.metrics,
        }
        ledger = {name: values.tolist() for name, values in vars(outcome.ledger).items()}
        disk().append(self.path, (json.dumps({"round": row, "clients": ledger}) + "\n").encode())
        self.rounds.append(row)
        return True

    def ledgers(self) -> list[dict[str, list[Any]]]:
        """Return the clients' ledgers of all rounds as columns, read from the disk."""
        return [json.loads(line)["clients"] for line in self.path.read_bytes().splitlines()] if self.rounds else []

    def rounds_table(self) -> pa.Table:
        """Return one row per round; metrics are null in rounds that were not evaluated."""
        columns = dict.fromkeys(name for row in self.rounds for name in row)
        return pa.table({name: [row.get(name) for row in self.rounds] for name in columns})

    def clients_table(self, profiles: Profiles) -> pa.Table:
        """Return one row per client and round, with the client's uplink rate."""
        ledgers = self.ledgers()
        names = ledgers[0] if ledgers else {}
        columns: dict[str, list[Any]] = {
            name: [value for ledger in ledgers for value in ledger[name]] for name in names
        }
        rounds = [row["round"] for row, ledger in zip(self.rounds, ledgers, strict=True) for _ in ledger["client"]]
        rates = profiles.uplink_bits_per_second[columns.get("client", [])].tolist() if rounds else []
        return pa.table({"round": rounds, **columns, "uplink_bits_per_second": rates})

    def write_tables(self, profiles: Profiles) -> tuple[pa.Table, pa.Table]:
        """Write `rounds.parquet` and `clients.parquet` to the run's folder and return them."""
        rounds, clients = self.rounds_table(), self.clients_table(profiles)
        for name, table in (("rounds.parquet", rounds), ("clients.parquet", clients)):
            disk().fill(self.path.with_name(name), partial(pq.write_table, table))
        return rounds, clients

    def final_metrics(self) -> dict[str, float]:
        """Return the metrics of the last evaluation and the training loss of the last round."""
        metrics: dict[str, float] = {}
        for row in self.rounds:
            metrics |= evaluation(row)
        return metrics | ({"loss": self.rounds[-1]["loss"]} if self.rounds else {})

    def best_metrics(self) -> dict[str, dict[str, float]]:
        """Return the best value of each metric and the first round that had it; the lowest of a loss."""
        best: dict[str, dict[str, float]] = {}
        for row in self.rounds:
            for name, value in evaluation(row).items():
                if name not in best or is_better(name, value, best[name]["value"]):
                    best[name] = {"value": value, "round": row["round"]}
        return best


def evaluation(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries of a round's row that an evaluation measured: those with a dot in their name."""
    return {name: value for name, value in row.items() if "." in name}
