"""The sampling of the clients that take part in a round, and models of the availability of clients."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, Protocol, Self

import numpy as np
from pydantic import Field, model_validator

from narrowcast.platform.config.catalog import AVAILABILITIES
from narrowcast.platform.config.files import Section
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator, stream_keys, uniform_unit
from narrowcast.platform.types import BoolArray, FloatArray, IntArray

Sampling = Literal["round_robin", "uniform", "by_examples"]


def rotation_of(sampling: Sampling, seed: int, n_clients: int) -> IntArray:
    """Return the order in which round robin visits the clients, [U]."""
    return generator(seed, "cohort").permutation(n_clients) if sampling == "round_robin" else np.arange(n_clients)


def cohort_size(clients_per_round: int, over_selection: float, n_clients: int) -> int:
    """Return the number of clients sampled in a round, at most all clients."""
    return math.ceil(min(round(clients_per_round * over_selection, 9), n_clients))


def next_in(order: IntArray, first: int, size: int, free: BoolArray | None) -> IntArray:
    """Return the next `size` clients of the rotation from position `first` on that are `free` [U]."""
    turn = (first + np.arange(size if free is None else len(order))) % len(order)
    return order[turn] if free is None else order[turn][free[order[turn]]][:size]


def weights_of(sampling: Sampling, examples: IntArray | None) -> IntArray | None:
    """Return the weights [U] of a draw of clients, from their numbers of examples; None for equal ones."""
    return examples if sampling == "by_examples" else None


def drawn_from(
    free: BoolArray | None,
    size: int,
    draw: np.random.Generator,
    n_clients: int,
    weights: IntArray | None = None,
    replacement: bool = False,
) -> IntArray:
    """Draw `size` of the clients that are `free` [U]; all of them if there are fewer, unless with `replacement`.

    Each client is equally likely, or drawn by the `weights` [U] of those that are left.
    """
    if free is None and weights is None:
        return draw.choice(n_clients, size, replacement)
    clients = np.arange(n_clients) if free is None else np.flatnonzero(free)
    if weights is not None:
        clients = clients[weights[clients] > 0]
    if not len(clients):
        return clients
    shares = None if weights is None else weights[clients] / weights[clients].sum()
    size = size if replacement else min(size, len(clients))
    return clients[draw.choice(len(clients), size, replacement, shares)]


class Availability(Protocol):
    """Contract of an availability model."""

    @property
    def kind(self) -> str:
        """Name in the catalog."""
        ...

    def check(self, n_clients: int) -> None:
        """Raise `UserError` if the model does not fit this number of clients."""
        ...

    def free(self, n_clients: int, seed: int, round_index: int, seconds: float) -> BoolArray | None:
        """Return whether each client can be sampled in this round [U], or None if all can.

        `seconds` is the simulated time at which the round begins. Pure: the answer for a client depends on seed, round,
        time and client only, never on other clients.
        """
        ...


class Always(Section):
    """All clients are always available."""

    kind: Literal["always"] = "always"

    def check(self, n_clients: int) -> None:
        """Accept any number of clients."""

    def free(self, n_clients: int, seed: int, round_index: int, seconds: float) -> BoolArray | None:
        """Return None: every client is available."""
        del n_clients, seed, round_index, seconds
        return None


class Bernoulli(Section):
    """Each client is available with the same probability, drawn independently in each round."""

    kind: Literal["bernoulli"] = "bernoulli"
    probability: float = Field(0.5, ge=0, le=1, description="probability that a client is available")

    def check(self, n_clients: int) -> None:
        """Accept any number of clients."""

    def free(self, n_clients: int, seed: int, round_index: int, seconds: float) -> BoolArray:
        """Return the clients available in this round, independent of the time."""
        del seconds
        return _uniform(n_clients, seed, "availability", round_index) < self.probability


class Diurnal(Section):
    """Each client is available with a probability that follows a cosine over the day.

    The probability is `highest` at the client's own midnight and `lowest` half a day later.

    Reference: Bonawitz et al., Towards Federated Learning at Scale: System Design, MLSys 2019 (arXiv:1902.01046),
    section 9: four times as many devices are available at night as by day.
    """

    kind: Literal["diurnal"] = "diurnal"
    lowest: float = Field(0.1, ge=0, le=1, description="probability at noon")
    highest: float = Field(0.4, ge=0, le=1, description="probability at midnight, the time at which a run starts")
    day_seconds: float = Field(86400.0, gt=0, allow_inf_nan=False, description="length of a day of the virtual clock")
    time_zones: float = Field(0.0, ge=0, le=1, description="share of the day over which clients' midnights spread")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.lowest > self.highest:
            raise ValueError(f"lowest = {self.lowest} is above highest = {self.highest}")
        return self

    def check(self, n_clients: int) -> None:
        """Accept any number of clients."""

    def free(self, n_clients: int, seed: int, round_index: int, seconds: float) -> BoolArray:
        """Return the available clients, drawn with the probability at the start of the round."""
        zone = self.time_zones * _uniform(n_clients, seed, "time zone", 0)
        night = (1 + np.cos(2 * np.pi * (seconds / self.day_seconds - zone))) / 2
        probability = self.lowest + (self.highest - self.lowest) * night
        return _uniform(n_clients, seed, "availability", round_index) < probability


def _uniform(n_clients: int, seed: int, purpose: str, round_index: int) -> np.ndarray:
    keys = stream_keys(seed, purpose, round_index, np.arange(n_clients))
    return uniform_unit(keys, np.zeros(n_clients, dtype=np.int64))


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
    counts = np.array([len(entry.times) for entry in ordered])
    return _AvailabilityRows(
        starts=np.cumsum(counts) - counts,
        time=np.array([time for entry in ordered for time in entry.times]),
        available=np.array([is_available for entry in ordered for is_available in entry.available]),
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


AnyAvailability = Annotated[Availability, AVAILABILITIES]
