"""The types that data flows through, from a client's profile to the record of a round.

Letters: C clients of a chunk or cohort, U clients in all, N items (rows of the item matrix), d embedding dimension,
r rank, R rows that a chunk's clients touch, n examples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Arrays = Mapping[str, NDArray[Any]]
"""Named arrays: a server state, the clients' states, a broadcast, a partial sum."""


@dataclass(frozen=True)
class ClientProfile:
    """What one client brings: its examples, its link and its device.

    Units: bits per second for the links; `compute_speed` is relative to the reference device of the clock.
    """

    client: int
    examples: int
    uplink_bits_per_second: float
    downlink_bits_per_second: float
    compute_speed: float


@dataclass(frozen=True)
class Profiles:
    """The profiles of many clients as columns, so that a million of them cost five arrays."""

    client: IntArray
    examples: IntArray
    uplink_bits_per_second: FloatArray
    downlink_bits_per_second: FloatArray
    compute_speed: FloatArray

    def __len__(self) -> int:
        return len(self.client)

    def __getitem__(self, row: int) -> ClientProfile:
        return ClientProfile(
            int(self.client[row]),
            int(self.examples[row]),
            float(self.uplink_bits_per_second[row]),
            float(self.downlink_bits_per_second[row]),
            float(self.compute_speed[row]),
        )

    def take(self, rows: IntArray) -> Profiles:
        """The profiles of some of the clients, in the order asked for."""
        return Profiles(
            self.client[rows],
            self.examples[rows],
            self.uplink_bits_per_second[rows],
            self.downlink_bits_per_second[rows],
            self.compute_speed[rows],
        )


class Payload(Protocol):
    """What crosses a link: it packs itself, and its weight is that of the packed bytes."""

    def wire_bits(self) -> int:
        """Eight times the length of `to_bytes()`, found without packing."""
        ...

    def to_bytes(self) -> bytes:
        """The bytes that a radio would send."""
        ...

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Unpack, or raise `PayloadError`; never runs code."""
        ...


class PayloadError(ValueError):
    """Bytes that are not a payload: truncated, padded, or of another shape than they claim."""


@dataclass(frozen=True)
class Chunk:
    """A fixed part of a round's cohort: the work of one call to a client host.

    Shapes: clients [C] ascending by place in the chunk; state holds each of these clients' private arrays, [C, ...];
    budget_bits [C], what each may send in this round, None if nothing limits it; lost [C], whose upload an outage
    takes or comes too late, None if there is none: it is paid for and does not enter the sum; epochs [C], the most
    that each has time for, None if all have time for the training's.

    Under secure aggregation, `relayed` is the record of public keys that the server passes on to all clients of the
    round, and `secrets` are the private keys of these clients: their host fills them in, and they never leave it.
    """

    round_index: int
    index: int
    clients: IntArray
    state: Arrays
    budget_bits: IntArray | None = None
    lost: BoolArray | None = None
    epochs: IntArray | None = None
    relayed: Any = None
    secrets: Arrays = field(default_factory=dict, repr=False)

    def affords(self, bits: IntArray) -> BoolArray:
        """Who may send so many bits, [C]."""
        return np.ones(len(self.clients), dtype=bool) if self.budget_bits is None else bits <= self.budget_bits

    def arrives(self) -> BoolArray:
        """Whose upload is not lost on the way, [C]."""
        return np.ones(len(self.clients), dtype=bool) if self.lost is None else ~self.lost


Rebuild = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
"""Makes a module's parameters, as torch tensors, from those that are trained and those that are frozen."""


@dataclass(frozen=True)
class LocalTerms:
    """What an algorithm adds to the clients' local steps.

    `proximal` is mu of mu/2 ||y - x||^2. Shapes: correction [C, ...] for each parameter, added to every gradient;
    epochs [C], where clients do less or more than the training says; gains [C, ...] that the gradients of the tensors
    they name are multiplied by. Where others than the module's own parameters are trained, `rebuild` makes these from
    them and from `frozen`.
    """

    proximal: float = 0.0
    correction: Arrays | None = None
    epochs: IntArray | None = None
    gains: Arrays | None = None
    rebuild: Rebuild | None = None
    frozen: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class LocalUpdates:
    """What a chunk's clients learnt: y - x for each parameter, before anything is sent.

    Shapes: changes and state [C, ...] each, `state` being the model's private parameters; loss [C] over the last local
    epoch; examples [C] trained in all epochs; steps [C] taken.
    """

    changes: Mapping[str, NDArray[np.float32]]
    state: Arrays
    loss: FloatArray
    examples: IntArray
    steps: IntArray


NO_RANK = -1
"""Stands in a ledger's `rank` where an update has none."""


@dataclass(frozen=True)
class ClientLedger:
    """What each client of a chunk sent, trained and lost in one round; all [C]."""

    client: IntArray
    rank: IntArray
    uplink_bits: IntArray
    examples: IntArray
    loss: FloatArray
    delivered: BoolArray

    @classmethod
    def merged(cls, parts: Sequence[ClientLedger]) -> ClientLedger:
        """The clients of several chunks, or of none, in ascending order."""
        none, nothing = np.empty(0, dtype=np.int64), np.empty(0, dtype=bool)
        parts = [cls(none, none, none, none, np.empty(0), nothing), *parts]
        order = np.argsort(np.concatenate([part.client for part in parts]))
        return cls(*(np.concatenate([getattr(part, each.name) for part in parts])[order] for each in fields(cls)))

    @classmethod
    def of_nobody(cls, clients: IntArray) -> ClientLedger:
        """Clients that were sent the model, and of which nothing else is known."""
        nothing, none = np.zeros(len(clients), dtype=np.int64), np.zeros(len(clients), dtype=bool)
        return cls(clients, np.full(len(clients), NO_RANK), nothing, nothing, np.full(len(clients), np.nan), none)


@dataclass(frozen=True)
class RoundLedger:
    """What each client of a round received, trained, took and sent; all [C], in ascending order of clients.

    `late` marks those that the server did not wait for, whose `seconds` are what they took all the same. `staleness`
    counts the server's steps since a client was sent its model, other than the one its update enters.
    """

    client: IntArray
    rank: IntArray
    uplink_bits: IntArray
    downlink_bits: IntArray
    examples: IntArray
    seconds: FloatArray
    loss: FloatArray
    delivered: BoolArray
    late: BoolArray
    staleness: IntArray


@dataclass(frozen=True)
class ChunkResult:
    """What comes back from a chunk: its part of the aggregate, the clients' new states and the ledger.

    `dropped` says that nothing came back, its host having failed: there is no part, and the states are as they were.
    `seconds` is the wall time of the chunk where it was trained, and `encode_seconds` what of it went into uploads.
    """

    index: int
    partial: Arrays
    state: Arrays
    ledger: ClientLedger
    dropped: bool = False
    seconds: float = 0.0
    encode_seconds: float = 0.0

    @classmethod
    def of_dropped(cls, chunk: Chunk) -> ChunkResult:
        """The clients of a chunk as stragglers that the server gave up on."""
        return cls(chunk.index, {}, chunk.state, ClientLedger.of_nobody(chunk.clients), dropped=True)

    def encoded_since(self, began: float) -> ChunkResult:
        """The same, its uploads put together since this moment of `time.perf_counter`."""
        return replace(self, encode_seconds=time.perf_counter() - began)


@dataclass(frozen=True)
class RoundRecord:
    """One row of `rounds.parquet`: a round as the driver saw it.

    `uplink_bits` and `downlink_bits` are of this round alone; those named `total_` add up since round 1.
    `loss` is the mean over the delivered clients' last local epochs; `mean_rank` is None where updates have no rank.
    """

    round: int
    clients: int
    delivered: int
    late: int
    loss: float
    mean_rank: float | None
    mean_staleness: float
    uplink_bits: int
    downlink_bits: int
    total_uplink_bits: int
    total_downlink_bits: int
    round_simulated_seconds: float
    simulated_seconds: float
