"""The loop over the clients of a chunk: encode within the budget, decode, account; and the chunk's result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.budget import ClientEncoder
from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.message_header import dtype_of
from narrowcast.algorithms.codecs.stage import Stage, UnsendableUpdateError
from narrowcast.algorithms.uploads.prefixed_arrays import CODEC
from narrowcast.platform.contracts import Task
from narrowcast.platform.seeds import stream_keys
from narrowcast.platform.types import (
    NO_RANK,
    Arrays,
    BoolArray,
    Chunk,
    ChunkResult,
    ClientLedger,
    IntArray,
    LocalUpdates,
)

Update = TypeVar("Update")
Received = TypeVar("Received")
Taken_co = TypeVar("Taken_co", covariant=True)
Put_contra = TypeVar("Put_contra", contravariant=True)


@dataclass(frozen=True)
class Sent(Generic[Received]):
    """One client's upload: its size, what the server decodes, the codec's state after it.

    `rank` is the rank of the update if the client chose it while it encoded.
    """

    bits: int
    received: Received
    state: Arrays
    rank: int | None = None


Wire = Callable[[Update, ClientEncoder], Sent[Received] | None]
"""Encodes one update and decodes what was sent; None if nothing fits the client's budget."""


@dataclass(frozen=True)
class Coding(Generic[Update, Received]):
    """Coding of updates: the codec, the wire format, and the levels [C] that the codec tries first, if chosen."""

    codec: Codec
    wire: Wire[Update, Received]
    first_levels: IntArray | None = None

    def codec_of(self, place: int) -> Codec:
        """Return the codec of the client at this place of the chunk, with its own levels."""
        return self.codec if self.first_levels is None else self.codec.with_levels(int(self.first_levels[place]))


class UpdateView(Protocol[Taken_co, Put_contra]):
    """The updates of a chunk's clients, taken and put back one client at a time; places are those of the chunk."""

    @property
    def finite(self) -> BoolArray:
        """The clients whose training stayed finite, [C]."""
        ...

    @property
    def ranks(self) -> IntArray | None:
        """The ranks of the updates, [C], or bounds on ranks that the wire chooses; None if updates have none."""
        ...

    @property
    def sends(self) -> BoolArray:
        """The clients that have something to send, [C]."""
        ...

    def take(self, place: int) -> Taken_co:
        """Return one client's update."""
        ...

    def put(self, place: int, received: Put_contra) -> None:
        """Store what the server decoded of one client's update."""
        ...


@dataclass(frozen=True)
class Uploads:
    """Uploads of the clients of a chunk, in the order of the chunk.

    Shapes: bits [C], 0 for clients that sent nothing; delivered [C], whether the update enters the sum; finite [C],
    whether the training stayed finite; state [C, ...], the codec's part of the clients' states; ranks [C], None if
    updates have none.
    """

    bits: IntArray
    delivered: BoolArray
    finite: BoolArray
    state: Arrays
    ranks: IntArray | None = None


def send_each(
    chunk: Chunk, task: Task, coding: Coding[Update, Received], view: UpdateView[Update, Received]
) -> Uploads:
    """Send the update of each client through the codec, at the finest levels that its budget allows.

    A client sends nothing and pays nothing if no levels fit its budget or if its update is not finite. A client whose
    upload is lost has paid, and its codec remembers the upload as sent.
    """
    n_clients = len(chunk.clients)
    bits, sent = np.zeros(n_clients, dtype=np.int64), np.zeros(n_clients, dtype=bool)
    ranks = None if view.ranks is None else view.ranks.copy()
    keys = stream_keys(task.seed, "codec", chunk.round_index, chunk.clients)
    budgets = np.full(n_clients, np.inf) if chunk.budget_bits is None else chunk.budget_bits.astype(np.float64)
    state = {name: np.array(values) for name, values in CODEC.of(chunk.state).items()}
    for place in np.flatnonzero(view.sends & view.finite).tolist():
        kept = {name: values[place] for name, values in state.items()}
        encoder = ClientEncoder(coding.codec_of(place), int(keys[place]), float(budgets[place]), kept)
        try:
            upload = coding.wire(view.take(place), encoder)
        except UnsendableUpdateError:
            continue
        if upload is None:
            continue
        view.put(place, upload.received)
        bits[place], sent[place] = upload.bits, True
        if ranks is not None and upload.rank is not None:
            ranks[place] = upload.rank
        for name, values in upload.state.items():
            state[name][place] = values
    return Uploads(bits, sent & chunk.arrives(), view.finite, CODEC.add(state), ranks)


def init_codec_state(stages: Sequence[Stage], n_clients: int, sent: Arrays) -> Arrays:
    """Return the codec's state on every client before round 1, [U, ...]: zeros that take no memory.

    `sent` are tensors like those that a client sends.
    """
    codec = Codec(tuple(stages), dtype_of(sent))
    return CODEC.add(zeros_of_clients(codec.init_state({name: each.shape for name, each in sent.items()}), n_clients))


def zeros_of_clients(like: Arrays, n_clients: int) -> dict[str, NDArray[Any]]:
    """Return zeros [U, ...] of the shape and type of each array, which take no memory."""
    return {
        name: np.broadcast_to(np.zeros((), values.dtype), (n_clients, *values.shape)) for name, values in like.items()
    }


def chunk_result(
    chunk: Chunk, updates: LocalUpdates, uploads: Uploads, partial: Arrays, *, state: Arrays | None = None
) -> ChunkResult:
    """Return a chunk's partial sum, its clients' new states and its ledger.

    `state` [C, ...] is what the algorithm adds to the clients' states. A client keeps what it learnt for itself even if
    its update is not sent or is lost, and its former state if its training left the finite numbers. The ledger has rank
    0 for clients that sent nothing.
    """
    learnt = {name: of_clients(uploads.finite, values, chunk.state[name]) for name, values in updates.state.items()}
    sent = uploads.bits > 0
    return ChunkResult(
        index=chunk.index,
        partial=partial,
        state={**learnt, **uploads.state, **(state or {})},
        ledger=ClientLedger(
            client=chunk.clients,
            rank=np.full(len(sent), NO_RANK) if uploads.ranks is None else np.where(sent, uploads.ranks, 0),
            uplink_bits=uploads.bits,
            examples=updates.examples,
            loss=updates.loss,
            delivered=uploads.delivered,
        ),
    )


def of_clients(chosen: BoolArray, values: NDArray[Any], others: NDArray[Any]) -> NDArray[Any]:
    """Return `values` [C, ...] for the chosen clients [C], and `others` [C, ...] for the rest."""
    return np.where(chosen.reshape(-1, *[1] * (values.ndim - 1)), values, others)
