"""Measured availability, read from a CSV file."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from narrowcast.platform.errors import UserError
from narrowcast.platform.section import Section
from narrowcast.platform.types import BoolArray, FloatArray

_COLUMNS = ("client", "time", "available")


class AvailabilityTrace(Section):
    """Rows `client, time, available` of a CSV file: from that second on the client is available (1) or not (0).

    The rows of a client begin at time 0 and are in order of time. Each holds until the client's next row, the last one
    for good or until the trace restarts after `repeat_seconds`. The file lists every client of the data set, and no
    other.
    """

    kind: Literal["trace"] = "trace"
    path: Path = Field(description="CSV file with the columns client, time, available")
    repeat_seconds: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="period after which the trace restarts; null: the last row holds"
    )

    @model_validator(mode="after")
    def _file_is_there(self) -> Self:
        if not self.path.is_file():
            raise ValueError(f"no file {self.path}; give a CSV file with the columns {', '.join(_COLUMNS)}")
        return self

    def check(self, n_clients: int) -> None:
        """Raise `UserError` if the file is malformed or does not list exactly these clients."""
        self._trace(n_clients)

    def free(self, n_clients: int, seed: int, round_index: int, seconds: float) -> BoolArray:
        """Return the clients available at this second.

        Seed and round have no effect. Raise `UserError` as `check` does.
        """
        del seed, round_index
        trace = self._trace(n_clients)
        now = seconds if self.repeat_seconds is None else seconds % self.repeat_seconds
        # Times are sorted within a client and clients are contiguous, so counting rows up to now finds the current row.
        begun = np.add.reduceat(trace.time <= now, trace.starts)
        return trace.available[trace.starts + begun - 1]

    def _trace(self, n_clients: int) -> _AvailabilityRows:
        try:
            stamp = self.path.stat()
            return _read(self.path, n_clients, stamp.st_mtime_ns, stamp.st_size)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{self.path}: cannot be read as a CSV file: {error}") from error


@dataclass(frozen=True)
class _AvailabilityRows:
    """All rows, client after client. Shapes: starts [U], the first row of each client; time and available [rows]."""

    starts: np.ndarray
    time: FloatArray
    available: BoolArray


@dataclass
class _ClientAvailability:
    times: list[float] = field(default_factory=list)
    available: list[bool] = field(default_factory=list)


@lru_cache(maxsize=4)
def _read(path: Path, n_clients: int, modified: int, size: int) -> _AvailabilityRows:
    """Return the trace of a file; `modified` and `size` invalidate the cache when the file changes."""
    del modified, size
    clients: dict[int, _ClientAvailability] = {}
    with path.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        if missing := set(_COLUMNS) - set(reader.fieldnames or ()):
            raise UserError(f"{path} has no column {', '.join(sorted(missing))}; needed: {', '.join(_COLUMNS)}")
        for row in reader:
            _add(clients, row, n_clients, f"{path}, line {reader.line_num}")
    if absent := [client for client in range(n_clients) if client not in clients]:
        raise UserError(f"{path} lacks {len(absent)} of {n_clients} clients, first {absent[0]}; add them")
    ordered = [clients[client] for client in range(n_clients)]
    counts = np.array([len(each.times) for each in ordered])
    return _AvailabilityRows(
        starts=np.cumsum(counts) - counts,
        time=np.array([time for each in ordered for time in each.times]),
        available=np.array([there for each in ordered for there in each.available]),
    )


def _add(clients: dict[int, _ClientAvailability], row: dict[str, str], n_clients: int, where: str) -> None:
    try:
        client, time, available = int(row["client"]), float(row["time"]), int(row["available"])
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {error}; every column must hold a number") from error
    if not 0 <= client < n_clients:
        raise UserError(f"{where}: client {client} is unknown; the data set has clients 0 to {n_clients - 1}")
    if available not in (0, 1):
        raise UserError(f"{where}: available = {available}; it must be 0 or 1")
    known = clients.setdefault(client, _ClientAvailability())
    if not (np.isfinite(time) and time > known.times[-1] if known.times else time == 0):
        due = f"above {known.times[-1]:g}, the time of the row before" if known.times else "0, the start of a trace"
        raise UserError(f"{where}: client {client} has time {time:g}; it must be {due}")
    known.times.append(time)
    known.available.append(bool(available))
