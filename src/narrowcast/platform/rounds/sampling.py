"""The sampling of the clients that take part in a round, and models of the availability of clients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self

import numpy as np
from pydantic import Field, model_validator

from narrowcast.platform.config.catalog import AVAILABILITIES, SAMPLINGS
from narrowcast.platform.config.csv_file import Columns, CSVFile
from narrowcast.platform.config.files import Section
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator, stream_keys, uniform_unit
from narrowcast.platform.types import BoolArray, FloatArray, IntArray


def cohort_size(clients_per_round: int, over_selection: float, n_clients: int) -> int:
    """Return the number of clients sampled in a round, at most all clients."""
    return math.ceil(min(round(clients_per_round * over_selection, 9), n_clients))


def drawn_new_clients(asked: float, n_clients: int, seed: int) -> BoolArray | None:
    """Return whether each client is a new one, which never takes part, [U]; None if none is.

    `asked` is their number, or below 1 their share. Raise `UserError` if nobody is left to train, or no client is new.
    """
    if not asked:
        return None
    number = round(asked * n_clients) if asked < 1 else round(asked)
    if not 0 < number < n_clients:
        raise UserError(
            f"new_clients = {asked:g} of {n_clients} clients leaves {number} to be new and {n_clients - number} to "
            "train; give a number or share that leaves some of both"
        )
    new = np.zeros(n_clients, dtype=bool)
    new[generator(seed, "new clients").choice(n_clients, number, replace=False)] = True
    return new


@dataclass(frozen=True)
class PredictedSeconds:
    """The seconds of some clients in a round as they are known before it, [n] each, and those of the server.

    A client downloads, then computes, then uploads.
    """

    download: FloatArray
    compute: FloatArray
    upload: FloatArray
    server: float = 0.0


@dataclass(frozen=True)
class Draw:
    """The arguments of a draw of clients, which the server makes from the public seed.

    `size` clients are asked for. `rotation` [U] is `Sampling.order`, and `first` the number of clients that were asked
    for before. Only clients that are `free` [U] can be drawn, None if all are. `part` tells the draws of a round apart.
    `predicted` gives the seconds of clients [n], from their profiles and the sizes of what they are sent and send; it
    is there for a sampling that `predicts`.
    """

    size: int
    seed: int
    round_index: int
    rotation: IntArray
    first: int = 0
    free: BoolArray | None = None
    examples: IntArray | None = None
    replacement: bool = False
    part: tuple[int, ...] = ()
    predicted: Callable[[IntArray], PredictedSeconds] | None = None

    @property
    def clients(self) -> IntArray:
        """The clients that can be drawn, ascending."""
        return np.arange(len(self.rotation)) if self.free is None else np.flatnonzero(self.free)

    def random(self) -> np.random.Generator:
        """Return the generator of this draw."""
        return generator(self.seed, "cohort", self.round_index, *self.part)


class Sampling(ABC):
    """Draws the clients of a round: a frozen model whose fields are its settings."""

    if TYPE_CHECKING:

        @property
        def kind(self) -> str:
            """Name in the catalog."""

    @property
    def repeats(self) -> bool:
        """Return whether a client may be drawn several times, if the plan has `replacement`; not by default."""
        return False

    @property
    def bounded(self) -> bool:
        """Return whether at most `Draw.size` clients are drawn, as buffered schedules and secure sums need."""
        return True

    @property
    def predicts(self) -> bool:
        """Return whether a draw looks at `Draw.predicted`, which has uploads that take turns; not by default."""
        return False

    def order(self, seed: int, n_clients: int) -> IntArray:
        """Return the order in which clients are visited, [U], made once in a run; by default that of their numbers."""
        del seed
        return np.arange(n_clients)

    @abstractmethod
    def draw(self, draw: Draw) -> IntArray:
        """Return the clients drawn, in any order; there may be none."""


class RoundRobin(Sampling, Section):
    """The next clients of a shuffled rotation."""

    kind: Literal["round_robin"] = "round_robin"

    def order(self, seed: int, n_clients: int) -> IntArray:
        """Return a permutation."""
        return generator(seed, "cohort").permutation(n_clients)

    def draw(self, draw: Draw) -> IntArray:
        """Return the next `size` clients of the rotation from position `first` on that are free."""
        order, size, free = draw.rotation, draw.size, draw.free
        turn = (draw.first + np.arange(size if free is None else len(order))) % len(order)
        return order[turn] if free is None else order[turn][free[order[turn]]][:size]


class Uniform(Sampling, Section):
    """An independent draw in each round, in which each client is equally likely."""

    kind: Literal["uniform"] = "uniform"

    @property
    def repeats(self) -> bool:
        """A client may be drawn several times."""
        return True

    def draw(self, draw: Draw) -> IntArray:
        """Return `size` of the clients that are free; all of them if there are fewer, unless with replacement."""
        if draw.free is None:
            return draw.random().choice(len(draw.rotation), draw.size, draw.replacement)
        return _chosen(draw, draw.clients, None)


class ByExamples(Sampling, Section):
    """An independent draw in each round, in which clients are as likely as they have examples, of those left."""

    kind: Literal["by_examples"] = "by_examples"

    @property
    def repeats(self) -> bool:
        """A client may be drawn several times."""
        return True

    def draw(self, draw: Draw) -> IntArray:
        """Return `size` of the clients that are free and have examples; all of them if there are fewer."""
        assert draw.examples is not None, "rounds know the clients' examples"
        clients = draw.clients[draw.examples[draw.clients] > 0]
        if not len(clients):
            return clients
        return _chosen(draw, clients, draw.examples[clients] / draw.examples[clients].sum())


def _chosen(draw: Draw, clients: IntArray, shares: FloatArray | None) -> IntArray:
    """Draw of these clients, with shares [n] if they are not equally likely; all of them if there are too few."""
    if not len(clients):
        return clients
    size = draw.size if draw.replacement else min(draw.size, len(clients))
    return clients[draw.random().choice(len(clients), size, draw.replacement, shares)]


class Poisson(Sampling, Section):
    """Each client takes part in each round by a draw of its own, so that the size of the cohort varies.

    A round may have no client: it costs the time of an idle round, and leaves the model as it is. This is the sampling
    that the accounting of differential privacy assumes.
    """

    kind: Literal["poisson"] = "poisson"
    rate: float | None = Field(
        None, gt=0, le=1, description="probability of each client; null: so that clients_per_round are expected"
    )

    @property
    def bounded(self) -> bool:
        """All clients may be drawn."""
        return False

    def draw(self, draw: Draw) -> IntArray:
        """Return the clients that are free and whose draw is below the rate."""
        rate = draw.size / len(draw.rotation) if self.rate is None else self.rate
        drawn = _uniform(len(draw.rotation), draw.seed, "poisson cohort", draw.round_index) < rate
        return draw.clients[drawn[draw.clients]]


class FedCS(Sampling, Section):
    """As many clients of a random cohort as can be done within a round in which uploads take turns.

    `clients_per_round` clients are drawn, each equally likely, and chosen one after the other: always the one that
    prolongs the round least, unless the round would then last `round_seconds`. If not even one fits, the one that is
    done first is chosen alone. Of equal clients the first drawn is chosen, so that of a fleet of equal clients the
    choice is random. `clock.uploads` is `sequential` too: uploads take turns in the order in which clients are ready,
    by which a round ends no later than planned.

    Reference: Nishio and Yonetani, Client Selection for Federated Learning with Heterogeneous Resources in Mobile Edge,
    ICC 2019 (arXiv:1804.08333), Algorithm 3.

    Differs from the paper: 1. the model goes to each client at its own rate, and who has it begins to compute; the plan
    waits for the slowest download first, as the paper's multicast does. 2. in the paper a round is empty if no client
    fits. 3. the time to choose clients and to aggregate is one, `clock.server_seconds`.
    """

    kind: Literal["fedcs"] = "fedcs"
    round_seconds: float = Field(
        180.0, gt=0, allow_inf_nan=False, description="T_round, which a planned round stays below"
    )

    @property
    def predicts(self) -> bool:
        """The seconds of clients decide."""
        return True

    def draw(self, draw: Draw) -> IntArray:
        """Return the clients that are chosen of `size` of those that are free, in the order of the choice."""
        assert draw.predicted is not None, "rounds predict the seconds of clients"
        asked = _chosen(draw, draw.clients, None)
        return asked[self.choice(draw.predicted(asked))]

    def choice(self, seconds: PredictedSeconds) -> IntArray:
        """Return the places of the clients that are chosen of n, in the order of the choice."""
        left, chosen = np.arange(len(seconds.upload)), list[int]()
        downloaded = uploaded = 0.0
        while len(left):
            until = np.maximum(uploaded, seconds.compute[left]) + seconds.upload[left]
            from_start = np.maximum(downloaded, seconds.download[left]) + until
            least = int(from_start.argmin())
            if from_start[least] + seconds.server < self.round_seconds or not chosen:
                chosen.append(int(left[least]))
                downloaded, uploaded = max(downloaded, float(seconds.download[left[least]])), float(until[least])
            left = np.delete(left, least)
        return np.array(chosen, dtype=np.int64)


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


class AvailabilityTrace(CSVFile):
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

    columns: ClassVar[Columns] = {"client": int, "time": float, "available": int}

    def check(self, n_clients: int) -> None:
        """Raise `UserError` if the file is malformed or does not list exactly these clients."""
        _read(self.path, n_clients, self.stamp)

    def free(self, n_clients: int, seed: int, round_index: int, seconds: float) -> BoolArray:
        """Return the clients available at this second.

        Seed and round have no effect. Raise `UserError` as `check` does.
        """
        del seed, round_index
        trace = _read(self.path, n_clients, self.stamp)
        now = seconds if self.repeat_seconds is None else seconds % self.repeat_seconds
        # Times are sorted within a client and clients are contiguous, so counting rows up to now finds the current row.
        begun = np.add.reduceat(trace.time <= now, trace.starts)
        return trace.available[trace.starts + begun - 1]


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
def _read(path: Path, n_clients: int, stamp: tuple[int, ...]) -> _AvailabilityRows:
    """Return the trace of a file; `stamp` invalidates the cache when the file changes."""
    del stamp
    clients: dict[int, _ClientAvailability] = {}
    for where, row in AvailabilityTrace.rows(path):
        _add(clients, row, n_clients, where)
    if absent := [client for client in range(n_clients) if client not in clients]:
        raise UserError(f"{path} lacks {len(absent)} of {n_clients} clients, first {absent[0]}; add them")
    ordered = [clients[client] for client in range(n_clients)]
    counts = np.array([len(entry.times) for entry in ordered])
    return _AvailabilityRows(
        starts=np.cumsum(counts) - counts,
        time=np.array([time for entry in ordered for time in entry.times]),
        available=np.array([is_available for entry in ordered for is_available in entry.available]),
    )


def _add(clients: dict[int, _ClientAvailability], row: dict[str, Any], n_clients: int, where: str) -> None:
    client, time, available = row.values()
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


AnySampling = Annotated[Sampling, SAMPLINGS]
AnyAvailability = Annotated[Availability, AVAILABILITIES]
