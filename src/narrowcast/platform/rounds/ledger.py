"""The ledger of a round's clients, the result of a chunk, and the record of a round.

Letters: C clients of a chunk or cohort.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from narrowcast.platform.types import Arrays, BoolArray, Chunk, FloatArray, IntArray

NO_RANK = -1
"""Marks an update without a rank in a ledger's `rank`."""


@dataclass(frozen=True)
class ClientLedger:
    """Account of each client of a chunk in one round: rank, bits sent, examples trained, loss and delivery; all [C]."""

    client: IntArray
    rank: IntArray
    uplink_bits: IntArray
    examples: IntArray
    loss: FloatArray
    delivered: BoolArray

    def take(self, indices: Sequence[int]) -> ClientLedger:
        """Return the account of the clients at these positions."""
        return ClientLedger(*(getattr(self, column.name)[indices] for column in fields(self)))

    @classmethod
    def merged(cls, parts: Sequence[ClientLedger]) -> ClientLedger:
        """Return the ledger of the clients of all parts, in ascending order; there may be no parts."""
        if len(parts) == 1 and (parts[0].client[1:] > parts[0].client[:-1]).all():
            return parts[0]
        empty, no_flags = np.empty(0, dtype=np.int64), np.empty(0, dtype=bool)
        parts = [cls(empty, empty, empty, empty, np.empty(0), no_flags), *parts]
        order = np.argsort(np.concatenate([part.client for part in parts]))
        return cls(*(np.concatenate([getattr(part, column.name) for part in parts])[order] for column in fields(cls)))

    @classmethod
    def without_results(cls, clients: IntArray) -> ClientLedger:
        """Return an empty ledger for clients that received the model but returned nothing."""
        zeros, unset = np.zeros(len(clients), dtype=np.int64), np.zeros(len(clients), dtype=bool)
        return cls(clients, np.full(len(clients), NO_RANK), zeros, zeros, np.full(len(clients), np.nan), unset)


@dataclass(frozen=True)
class Weighted:
    """The values of a metric of clients, and their weights in its mean over the round; [C] each.

    A client of weight 0 is left out, and may have any value.
    """

    values: FloatArray
    weight: FloatArray

    def take(self, indices: IntArray | BoolArray) -> Weighted:
        """Return the values and weights of these clients."""
        return Weighted(self.values[indices], self.weight[indices])

    @property
    def mean(self) -> float:
        """The weighted mean; NaN over no client."""
        counted = self.take(self.weight > 0)
        if not len(counted.weight):
            return float("nan")
        return float((counted.values * counted.weight).sum() / counted.weight.sum())


def joined_metrics(parts: Sequence[Mapping[str, Weighted]]) -> dict[str, Weighted]:
    """Return the metrics of the clients of all parts, one part after the other."""

    def joined(name: str, column: str) -> FloatArray:
        return np.concatenate([getattr(part[name], column) for part in parts if name in part])

    names = dict.fromkeys(name for part in parts for name in part)
    return {name: Weighted(joined(name, "values"), joined(name, "weight")) for name in names}


@dataclass(frozen=True)
class RoundLedger:
    """Account of each client of a round; all [C], in ascending order of clients.

    `late` marks the clients that the server did not wait for; `seconds` is their time all the same. `staleness` counts
    the server's steps since a client was sent its model, except the one its update enters.
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
    """Result of a chunk: its partial sum, the clients' new states and their ledger.

    `dropped` marks a chunk whose host failed: it has no partial sum, and the states are unchanged. `seconds` is the
    wall time of the chunk on its host, and `encode_seconds` the part of it spent on uploads. `values_cut` of the
    `values` that are sent as integers of a fixed range were larger than the range, which the server cannot see.
    `touched_bits` is the size of the clients' changed rows in float32, all columns; 0 for updates that are not rows.
    `metrics` [C] each are what clients report of themselves, in the ledger's order; those that delivered are counted.
    """

    index: int
    partial: Arrays
    state: Arrays
    ledger: ClientLedger
    dropped: bool = False
    seconds: float = 0.0
    encode_seconds: float = 0.0
    values_cut: int = 0
    values: int = 0
    touched_bits: int = 0
    metrics: Mapping[str, Weighted] = field(default_factory=dict)

    @classmethod
    def of_dropped(cls, chunk: Chunk) -> ChunkResult:
        """Return the result of a chunk whose host failed: all clients count as stragglers."""
        return cls(chunk.index, {}, chunk.state, ClientLedger.without_results(chunk.clients), dropped=True)

    def encoded_since(self, began: float) -> ChunkResult:
        """Return the result with the time since `began`, a moment of `time.perf_counter`, as its encoding time."""
        return replace(self, encode_seconds=time.perf_counter() - began)


@dataclass(frozen=True)
class ClientMeasures:
    """Metrics of a chunk's clients by `split.metric`, [C] each; NaN for a client without samples of the split."""

    index: int
    metrics: Mapping[str, FloatArray]


@dataclass(frozen=True)
class RoundRecord:
    """One row of `rounds.parquet`: a round as the driver sees it.

    `uplink_bits` and `downlink_bits` are of this round alone; names with `total_` accumulate since round 1, and
    `total_bits` is uplink and downlink together. `loss` is the mean over the delivered clients' last local epochs;
    `mean_rank` is None if updates have no rank. `clipped_share` is the share of the values sent that `secure.clip` cut,
    as the simulation measures it; None without `secure`. `allocation_bits` are those of the round's bits, up and down,
    that allocate the uplink (channel states, grants); not attributed to any client. `touched_bits` would be the round's
    uplink if clients sent their changed rows in float32, all columns; 0 for updates that are not rows. `metrics` are
    the algorithm's own, of its clients and of its server's step; each is a column.
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
    total_bits: int
    round_simulated_seconds: float
    simulated_seconds: float
    clipped_share: float | None = None
    allocation_bits: int = 0
    touched_bits: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """Return the columns of the round, one for each metric too."""
        columns = dict(vars(self))
        metrics = columns.pop("metrics")
        return {**columns, **metrics}


ROUND_COLUMNS = frozenset(
    (
        *(column.name for column in fields(RoundRecord)),
        *(f"{part}_wall_seconds" for part in ("round", "broadcast", "train", "encode", "aggregate", "evaluate", "log")),
        *("wall_seconds", "logged_at_ms"),
    )
)
"""The columns of a round's row of the journal that are not metrics."""
METRIC_NAME = r"[\w@: -]+"
"""Names of metrics: a dot separates the split from the name, and MLflow takes no other characters."""
