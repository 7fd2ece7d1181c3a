"""Uploads of the clients of a chunk: encode each within its budget, decode it, account for it; and the chunk's result.

A client sends whole tensors, or the rows of a tensor that it changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.budget import ClientEncoder
from narrowcast.algorithms.codecs.chain import Codec, Stage, Stages, UnsendableUpdateError
from narrowcast.algorithms.codecs.messages import (
    CodedTensors,
    LikelyRows,
    RowLayout,
    RowUpdate,
    TensorUpdate,
    decode_matrix,
    decode_rows,
    dense_wire_bits,
    encode_matrix,
    encode_rows,
    encode_tensors,
    rows_wire_bits,
)
from narrowcast.algorithms.codecs.sparsify import memory_of_rows, with_memory_of_rows
from narrowcast.algorithms.codecs.wire import dtype_of
from narrowcast.platform.contracts import Task
from narrowcast.platform.rounds.ledger import NO_RANK, ChunkResult, ClientLedger, Weighted
from narrowcast.platform.seeds import stream_keys
from narrowcast.platform.types import (
    Arrays,
    BoolArray,
    Chunk,
    IntArray,
    LocalUpdates,
    PrefixedArrays,
    RowChanges,
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
    updates have none. `touched_bits` is the size of the clients' changed rows in float32, all columns; 0 for tensors.
    """

    bits: IntArray
    delivered: BoolArray
    finite: BoolArray
    state: Arrays
    ranks: IntArray | None = None
    touched_bits: int = 0


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
    chunk: Chunk,
    updates: LocalUpdates,
    uploads: Uploads,
    partial: Arrays,
    state: Arrays = MappingProxyType({}),
    metrics: Mapping[str, Weighted] = MappingProxyType({}),
) -> ChunkResult:
    """Return a chunk's partial sum, its clients' new states, its ledger and metrics.

    `state` [C, ...] is what the algorithm adds to the clients' states. A client keeps what it learnt for itself even if
    its update is not sent or is lost, and its previous state if its training left the finite numbers. The ledger has
    rank 0 for clients that sent nothing.
    """
    learnt = {name: where_client(uploads.finite, values, chunk.state[name]) for name, values in updates.state.items()}
    sent = uploads.bits > 0
    return ChunkResult(
        index=chunk.index,
        partial=partial,
        state={**learnt, **uploads.state, **state},
        ledger=ClientLedger(
            client=chunk.clients,
            rank=np.full(len(sent), NO_RANK) if uploads.ranks is None else np.where(sent, uploads.ranks, 0),
            uplink_bits=uploads.bits,
            examples=updates.examples,
            loss=updates.loss,
            delivered=uploads.delivered,
        ),
        touched_bits=uploads.touched_bits,
        metrics=dict(metrics),  # the default cannot be pickled
    )


def where_client(chosen: BoolArray, values: NDArray[Any], others: NDArray[Any]) -> NDArray[Any]:
    """Return `values` [C, ...] for the chosen clients [C], and `others` [C, ...] for the rest."""
    return np.where(chosen.reshape(-1, *[1] * (values.ndim - 1)), values, others)


Tensors = Arrays


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
    client's columns depend on it. `rows` are changes of tensors that are sent whole, made one client at a time.
    """

    changes: Tensors
    examples: IntArray
    finite: BoolArray
    sends: BoolArray
    columns: Columns | None = None
    ranks: IntArray | None = None
    rows: Mapping[str, RowChanges] = field(default_factory=dict)
    received: dict[str, NDArray[Any]] = field(init=False)

    def __post_init__(self) -> None:
        shapes = {name: values.shape for name, values in self.changes.items()}
        shapes |= {name: (len(self.sends), part.n_rows, *part.values.shape[1:]) for name, part in self.rows.items()}
        dtype = dtype_of({**self.changes, **{name: part.values for name, part in self.rows.items()}})
        object.__setattr__(self, "received", {name: np.zeros(shape, dtype) for name, shape in shapes.items()})

    def take(self, index: int) -> TensorUpdate:
        """Return one client's tensors in its own columns."""
        tensors = {name: values[index][self._own(name, index)] for name, values in self.changes.items()}
        tensors |= {name: part.matrix(index) for name, part in self.rows.items()}
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


@dataclass(frozen=True)
class RowView:
    """Each client's rows of the changes, in the columns that it sends; `received` has the same shape [R, k].

    Shapes: examples [C], which are sent with the rows; finite, sends and ranks [C].
    `likely`, if the receiver expects rows, gives those of the client at a place of the chunk.
    """

    changes: RowChanges
    examples: IntArray
    finite: BoolArray
    sends: BoolArray
    ranks: IntArray | None = None
    likely: Callable[[int], LikelyRows] | None = None
    received: NDArray[Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "received", np.zeros_like(self.changes.values))

    def take(self, index: int) -> RowUpdate:
        """Return one client's rows in its own columns."""
        rows, values = self.changes.of_client(index)
        likely = None if self.likely is None else self.likely(index)
        return RowUpdate(rows, values[:, self._own(index)], self.changes.n_rows, int(self.examples[index]), likely)

    def put(self, index: int, received: NDArray[Any]) -> None:
        """Store the rows that the server decoded of one client."""
        self.received[self.changes.span(index), self._own(index)] = received

    def _own(self, index: int) -> IntArray | slice:
        """Return the columns that a client sends; a slice, which copies nothing, if these are all."""
        columns = self.changes.columns
        return slice(None) if columns is None or columns[index].all() else np.flatnonzero(columns[index])


def send_touched_rows(update: RowUpdate, encoder: ClientEncoder) -> Sent[NDArray[np.float32]] | None:
    """Send the touched rows; the codec's memory of the other rows stays as it is."""
    before = memory_of_rows(encoder.state, update.rows)
    fitting = encode_rows(replace(encoder, state=before), update)
    if fitting is None:
        return None
    payload, after = fitting
    _, received = decode_rows(
        *(encoder.codec, payload.to_bytes(), update.n_rows, update.values.shape[1], encoder.key), likely=update.likely
    )
    return Sent(payload.wire_bits(), received, with_memory_of_rows(encoder.state, update.rows, after))


def send_whole_matrix(update: RowUpdate, encoder: ClientEncoder) -> Sent[NDArray[np.float32]] | None:
    """Send the whole matrix; the decoded values of untouched rows are dropped, and the client keeps no codec state."""
    n_rows, columns = update.n_rows, update.values.shape[1]
    payload = encode_matrix(encoder, update.rows, update.values, n_rows, update.positives)
    if payload is None:
        return None
    _, received = decode_matrix(encoder.codec, payload.to_bytes(), n_rows, columns, encoder.key)
    return Sent(payload.wire_bits(), received, {})


def send_coded_tensors(update: TensorUpdate, encoder: ClientEncoder) -> Sent[Tensors] | None:
    """Send the tensors through the codec."""
    fitting = encode_tensors(encoder, update)
    if fitting is None:
        return None
    payload, after = fitting
    arrived = CodedTensors.from_bytes(payload.to_bytes())
    shapes = {name: values.shape for name, values in update.tensors.items()}
    return Sent(payload.wire_bits(), encoder.codec.of(arrived.dtype).decode(arrived.coded, shapes, encoder.key), after)


WIRES: Mapping[str, Wire[Any, Any]] = {
    "tensor": send_coded_tensors,
    "touched": send_touched_rows,
    "all": send_whole_matrix,
}
"""The encoding and decoding of one client's message through a codec, by its layout."""

COUNT_BITS = 32
"""The size of a whole number beside tensors."""


@dataclass(frozen=True)
class Message:
    """The message of each client: tensors [C, ...], through the codec if there is one, and numbers beside them.

    Shapes: numbers [C] each, of 32 bits if they are whole, otherwise of the tensors' type; sends [C], the clients that
    have something to send, None for those with examples; max_ranks [C], bounds on ranks that the wire chooses; levels
    [C], those that the codec tries first, None for its own. `columns` are those that clients send of some tensors, None
    for all; clients of rank 0 send nothing.

    `rows` are changes of some rows of tensors, sent as `layout` says: `tensor`, as a whole tensor beside the others,
    zeros included; or as the only one of the message, `touched`, the changed rows and which they are, or `all`, every
    row, and with `mask` which were changed. `likely` gives the rows that the receiver expects of the client at a place.
    `wire` encodes one client's tensors or rows and decodes them; None for that of the layout.
    """

    tensors: Tensors = field(default_factory=dict)
    numbers: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    sends: BoolArray | None = None
    columns: Columns | None = None
    max_ranks: IntArray | None = None
    levels: IntArray | None = None
    rows: Mapping[str, RowChanges] = field(default_factory=dict)
    layout: Literal["tensor", "touched", "all"] = "tensor"
    mask: bool = True
    likely: Callable[[int], LikelyRows] | None = None
    wire: Wire[Any, Any] | None = None

    @cached_property
    def ranks(self) -> IntArray | None:
        """The ranks of the clients' updates, [C], or bounds on them; None if updates have none."""
        if self.columns is not None:
            return self.columns.ranks
        own = [changes.columns.sum(axis=1) for changes in self.rows.values() if changes.columns is not None]
        return own[0] if own else self.max_ranks

    @property
    def values(self) -> Tensors:
        """The values of tensors and of rows."""
        return {**self.tensors, **{name: part.values for name, part in self.rows.items()}}

    @property
    def number_bits(self) -> int:
        """The size of one client's numbers."""
        return sum(bits_of_number(values, self.tensors) for values in self.numbers.values())

    def plain_bits(self, n_clients: int) -> IntArray:
        """Return the size of each client's tensors or rows without a codec, [C]."""
        masks = {} if self.columns is None else self.columns.masks
        if self.layout != "tensor":
            (changes,), ranks = self.rows.values(), self.ranks
            rank = np.full(n_clients, changes.values.shape[1]) if ranks is None else ranks
            return row_bits(changes, rank, self.layout, mask=self.mask)
        whole = sum(prod(values.shape[1:]) for name, values in self.tensors.items() if name not in masks)
        whole += sum(changes.n_rows * prod(changes.values.shape[1:]) for changes in self.rows.values())
        n_values = np.full(n_clients, whole)
        for name in masks.keys() & self.tensors.keys():
            n_values += self.tensors[name].shape[1] * masks[name].sum(axis=1)
        return dense_wire_bits(n_values, dtype_of(self.values))

    def sent(self, chunk: Chunk, task: Task) -> BoolArray:
        """Return the clients that have something to send, [C]."""
        sends = task.data.examples[chunk.clients] > 0 if self.sends is None else self.sends
        return sends if self.ranks is None else sends & (self.ranks > 0)

    def fits(self, chunk: Chunk, task: Task) -> BoolArray:
        """Return the clients that have something to send and may send it without a codec, [C]."""
        sends, budgets = self.sent(chunk, task), chunk.budget_bits
        return sends if budgets is None else sends & (self.plain_bits(len(sends)) <= budgets)


def row_bits(changes: RowChanges, ranks: IntArray, layout: RowLayout, *, mask: bool) -> IntArray:
    """Return the size of each client's rows in float32, known before the training; ranks and bits [C], or [C, ...]."""
    sent_rows = changes.counts.reshape(-1, *[1] * (np.ndim(ranks) - 1))
    return np.asarray(rows_wire_bits(n_rows=changes.n_rows, sent_rows=sent_rows, rank=ranks, layout=layout, mask=mask))


def bits_of_number(number: NDArray[Any], tensors: Tensors) -> int:
    """Return the size of a number that is sent beside these tensors."""
    return COUNT_BITS if np.issubdtype(number.dtype, np.integer) else 8 * dtype_of(tensors).itemsize


def with_bits(bits: IntArray, more: int) -> IntArray:
    """Return the sizes of uploads with so many bits more, [C]; clients that send nothing send no more either."""
    return np.where(bits > 0, bits + more, 0)


def send_messages(
    chunk: Chunk, task: Task, message: Message, stages: Stages, finite: BoolArray
) -> tuple[Tensors, Mapping[str, RowChanges], Uploads]:
    """Send each client's message; return what the server decodes of its tensors and rows, and what was sent.

    A client whose budget does not allow its upload sends nothing and pays nothing; one whose upload is lost has paid.
    `finite` [C] are the clients whose training stayed finite. Rows that a client leaves out are decoded as NaN.
    """
    limited = chunk.reserve_bits(message.number_bits) if message.numbers else chunk
    sends = message.sent(chunk, task)
    tensors, rows = message.tensors, message.rows
    if not stages:
        uploads = _send_plain(limited, message, sends, finite)
    else:
        examples, columns = task.data.examples[chunk.clients], message.columns
        wire, ranks = message.wire or WIRES[message.layout], message.ranks
        coding: Coding[Any, Any] = Coding(Codec(stages, dtype_of(message.values)), wire, message.levels)
        if message.layout == "tensor":
            view = TensorView(tensors, examples, finite, sends, columns, ranks, rows)
            uploads = send_each(limited, task, coding, view)
            tensors = {name: view.received[name] for name in tensors}
            rows = {name: RowChanges.whole(view.received[name]) for name in rows}
        else:
            ((name, changes),) = rows.items()
            of_rows = RowView(changes, examples, finite, sends, ranks, message.likely)
            uploads = send_each(limited, task, coding, of_rows)
            rows = {name: replace(changes, values=of_rows.received)}
    if message.numbers:
        uploads = replace(uploads, bits=with_bits(uploads.bits, message.number_bits))
    return tensors, rows, uploads


def finite_clients(updates: LocalUpdates, sent: Tensors) -> BoolArray:
    """Return the clients whose training, and the tensors and rows that they send, stayed finite, [C]."""
    if updates.finite is not None:
        return updates.finite
    finite = np.isfinite(updates.loss)
    others = () if sent is updates.changes else sent.values()
    arrays = (*updates.changes.values(), *updates.state.values(), *others)
    if not all_finite(*arrays):
        for values in arrays:
            finite &= np.isfinite(values).reshape(len(values), -1).all(axis=1)
    for changes in updates.rows.values():
        if not all_finite(changes.values):
            rows = np.isfinite(changes.values).reshape(len(changes.values), -1).all(axis=1)
            finite[changes.owners[~rows]] = False
    return finite


def _send_plain(chunk: Chunk, message: Message, sends: BoolArray, finite: BoolArray) -> Uploads:
    """Send all values as they are; an update that is not finite is sent and paid for, and does not count."""
    bits = message.plain_bits(len(sends))
    if chunk.budget_bits is not None:
        sends = sends & (bits <= chunk.budget_bits)
    return Uploads(np.where(sends, bits, 0), sends & finite & chunk.arrives(), finite, {}, message.ranks)
