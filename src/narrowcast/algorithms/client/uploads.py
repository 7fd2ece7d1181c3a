"""Uploads of a chunk of clients, one by one: encode, decode, account, and add up.

The loop over the clients of a chunk: encode within the budget, decode, account; and the chunk's result.

Uploads that are whole tensors: train a chunk, send each client's tensors, and add them up.

Parts of a flat mapping of arrays, each under a prefix of its own: a server state, client states, a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.budget import ClientEncoder
from narrowcast.algorithms.codecs.chain import Codec, Stage, UnsendableUpdateError
from narrowcast.algorithms.codecs.messages import CodedTensors, TensorUpdate, dense_wire_bits, encode_tensors
from narrowcast.algorithms.codecs.wire import dtype_of
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
    PrefixedArrays,
    all_finite,
)

CODEC = PrefixedArrays("codec/")
"""Client state that codecs keep: error memories, warm factors; [U, ...]."""
CONTROL = PrefixedArrays("control/")
"""Control variates: c_u [U, ...] of the clients, c of the server."""
UPDATE = PrefixedArrays("update/")
"""The change that the last round made to each tensor, in a server state."""


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

    def codec_of(self, index: int) -> Codec:
        """Return the codec of the client at this place of the chunk, with its own levels."""
        return self.codec if self.first_levels is None else self.codec.with_levels(int(self.first_levels[index]))


class UpdateView(Protocol[Taken_co, Put_contra]):
    """The updates of a chunk's clients, taken and put back one client at a time; `index` is that in the chunk."""

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

    def take(self, index: int) -> Taken_co:
        """Return one client's update."""
        ...

    def put(self, index: int, received: Put_contra) -> None:
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

    A client whose update is not finite, or fits its budget at no level, sends nothing (0 bits). A client whose
    upload is lost has paid, and its codec remembers the upload as sent.
    """
    n_clients = len(chunk.clients)
    bits, sent = np.zeros(n_clients, dtype=np.int64), np.zeros(n_clients, dtype=bool)
    ranks = None if view.ranks is None else view.ranks.copy()
    keys = stream_keys(task.seed, "codec", chunk.round_index, chunk.clients)
    budgets = np.full(n_clients, np.inf) if chunk.budget_bits is None else chunk.budget_bits.astype(np.float64)
    state = {name: np.array(values) for name, values in CODEC.of(chunk.state).items()}
    for index in np.flatnonzero(view.sends & view.finite).tolist():
        memory = {name: values[index] for name, values in state.items()}
        encoder = ClientEncoder(coding.codec_of(index), int(keys[index]), float(budgets[index]), memory)
        try:
            upload = coding.wire(view.take(index), encoder)
        except UnsendableUpdateError:
            continue
        if upload is None:
            continue
        view.put(index, upload.received)
        bits[index], sent[index] = upload.bits, True
        if ranks is not None and upload.rank is not None:
            ranks[index] = upload.rank
        for name, values in upload.state.items():
            state[name][index] = values
    return Uploads(bits, sent & chunk.arrives(), view.finite, CODEC.add(state), ranks)


def init_codec_state(stages: Sequence[Stage], n_clients: int, sent: Arrays) -> Arrays:
    """Return the codec's state on every client before round 1, [U, ...]: zeros that take no memory.

    `sent` are tensors like those that a client sends.
    """
    codec = Codec(tuple(stages), dtype_of(sent))
    return CODEC.add(
        zeros_of_clients(codec.init_state({name: values.shape for name, values in sent.items()}), n_clients)
    )


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
    its update is not sent or is lost, and its previous state if its training left the finite numbers. The ledger has
    rank 0 for clients that sent nothing.
    """
    learnt = {name: where_client(uploads.finite, values, chunk.state[name]) for name, values in updates.state.items()}
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


def where_client(chosen: BoolArray, values: NDArray[Any], others: NDArray[Any]) -> NDArray[Any]:
    """Return `values` [C, ...] for the chosen clients [C], and `others` [C, ...] for the rest."""
    return np.where(chosen.reshape(-1, *[1] * (values.ndim - 1)), values, others)


Tensors = Arrays
TensorCoding = Coding[TensorUpdate, Tensors]


@dataclass(frozen=True)
class Columns:
    """The columns that each client sends of some tensors [long, r]: how many, and for each tensor which.

    Shapes: ranks [C]; masks [C, r] of each tensor. Both sides draw `masks` from the round's seed.
    """

    ranks: IntArray
    masks: Mapping[str, BoolArray]


@dataclass(frozen=True)
class TensorView:
    """Each client's changes [C, ...], in the columns that it sends; `received` has the same shapes.

    Shapes: examples [C], which are sent with the tensors; finite, sends and ranks [C]. The rank is sent too if the
    client's columns depend on it.
    """

    changes: Tensors
    examples: IntArray
    finite: BoolArray
    sends: BoolArray
    columns: Columns | None = None
    ranks: IntArray | None = None
    received: dict[str, NDArray[Any]] = field(init=False)

    def __post_init__(self) -> None:
        dtype = dtype_of(self.changes)
        zeros = {name: np.zeros(values.shape, dtype) for name, values in self.changes.items()}
        object.__setattr__(self, "received", zeros)

    def take(self, index: int) -> TensorUpdate:
        """Return one client's tensors in its own columns."""
        tensors = {name: values[index][self._own(name, index)] for name, values in self.changes.items()}
        rank = 0 if self.columns is None else int(self.columns.ranks[index])
        return TensorUpdate(tensors, int(self.examples[index]), rank)

    def put(self, index: int, received: Tensors) -> None:
        """Store the tensors that the server decoded of one client."""
        for name, values in received.items():
            self.received[name][index, ...][self._own(name, index)] = values

    def _own(self, name: str, index: int) -> tuple[slice, BoolArray] | tuple[()]:
        return (
            ()
            if self.columns is None or name not in self.columns.masks
            else (slice(None), self.columns.masks[name][index])
        )


def send_coded_tensors(update: TensorUpdate, encoder: ClientEncoder) -> Sent[Tensors] | None:
    """Send the tensors through the codec."""
    fitting = encode_tensors(encoder, update)
    if fitting is None:
        return None
    payload, after = fitting
    arrived = CodedTensors.from_bytes(payload.to_bytes())
    shapes = {name: values.shape for name, values in update.tensors.items()}
    return Sent(payload.wire_bits(), encoder.codec.of(arrived.dtype).decode(arrived.coded, shapes, encoder.key), after)


def tensor_coding(codec: Codec) -> TensorCoding:
    """Return how tensors are coded; as they are if the codec has no stages."""
    return Coding(codec, send_coded_tensors)


COUNT_BITS = 32
"""The size of a whole number beside tensors."""


@dataclass(frozen=True)
class Message:
    """The message of each client: tensors [C, ...], through the codec if there is one, and numbers beside them.

    Shapes: numbers [C] each, of 32 bits if they are whole, otherwise of the tensors' type; sends [C], the clients that
    have something to send, None for those with examples; max_ranks [C], bounds on ranks that the wire chooses.
    `columns` are those that clients send of some tensors, None for all; clients of rank 0 send nothing.
    """

    tensors: Tensors
    numbers: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    sends: BoolArray | None = None
    columns: Columns | None = None
    max_ranks: IntArray | None = None

    @property
    def number_bits(self) -> int:
        """The size of one client's numbers."""
        return sum(bits_of_number(values, self.tensors) for values in self.numbers.values())


def bits_of_number(number: NDArray[Any], tensors: Tensors) -> int:
    """Return the size of a number that is sent beside these tensors."""
    return COUNT_BITS if np.issubdtype(number.dtype, np.integer) else 8 * dtype_of(tensors).itemsize


def with_bits(bits: IntArray, more: int) -> IntArray:
    """Return the sizes of uploads with so many bits more, [C]; clients that send nothing send no more either."""
    return np.where(bits > 0, bits + more, 0)


def send_tensors(
    chunk: Chunk, task: Task, message: Message, coding: TensorCoding, finite: BoolArray
) -> tuple[Tensors, Uploads]:
    """Send each client's message; return what the server decodes of its tensors [C, ...], and what was sent.

    Clients without examples send nothing. A client whose budget does not allow its upload sends nothing and pays
    nothing; one whose upload is lost has paid. `finite` [C] are the clients whose training stayed finite.
    """
    limited = chunk.reserve_bits(message.number_bits)
    examples = task.data.examples[chunk.clients]
    sends = examples > 0 if message.sends is None else message.sends
    if message.columns is not None:
        sends = sends & (message.columns.ranks > 0)
    if coding.codec.stages:
        ranks = message.max_ranks if message.columns is None else message.columns.ranks
        view = TensorView(message.tensors, examples, finite, sends, message.columns, ranks)
        typed = replace(coding, codec=coding.codec.of(dtype_of(message.tensors)))
        received: Tensors = view.received
        uploads = send_each(limited, task, typed, view)
    else:
        received, uploads = message.tensors, _send_whole(limited, message.tensors, message.columns, sends, finite)
    return received, replace(uploads, bits=with_bits(uploads.bits, message.number_bits))


def finite_clients(updates: LocalUpdates, sent: Tensors) -> BoolArray:
    """Return the clients whose training, and the tensors that they send, stayed finite, [C]."""
    finite = np.isfinite(updates.loss)
    others = () if sent is updates.changes else sent.values()
    arrays = (*updates.changes.values(), *updates.state.values(), *others)
    if not all_finite(*arrays):
        for values in arrays:
            finite &= np.isfinite(values).reshape(len(values), -1).all(axis=1)
    return finite


def _send_whole(
    chunk: Chunk, changes: Tensors, columns: Columns | None, sends: BoolArray, finite: BoolArray
) -> Uploads:
    """Send all values as they are; an update that is not finite is sent and paid for, and does not count."""
    masks = {} if columns is None else columns.masks
    whole = sum(prod(values.shape[1:]) for name, values in changes.items() if name not in masks)
    n_values = np.full(len(sends), whole)
    for name in masks.keys() & changes.keys():
        n_values += changes[name].shape[1] * masks[name].sum(axis=1)
    bits = dense_wire_bits(n_values, dtype_of(changes))
    sends = sends & chunk.affords(bits)
    ranks = None if columns is None else columns.ranks
    return Uploads(np.where(sends, bits, 0), sends & finite & chunk.arrives(), finite, {}, ranks)
