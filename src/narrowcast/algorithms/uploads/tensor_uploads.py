"""Uploads that are whole tensors: train a chunk, send each client's tensors, and add them up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.budget import ClientEncoder
from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.coded_tensors import CodedTensors, TensorUpdate, encode_tensors
from narrowcast.algorithms.codecs.dense import dense_wire_bits
from narrowcast.algorithms.codecs.message_header import dtype_of
from narrowcast.algorithms.uploads.client_loop import Coding, Sent, Uploads, send_each
from narrowcast.platform.contracts import Task
from narrowcast.platform.types import Arrays, BoolArray, Chunk, IntArray, LocalUpdates, all_finite

Tensors = Arrays
TensorCoding = Coding[TensorUpdate, Tensors]


@dataclass(frozen=True)
class Columns:
    """The columns that each client sends of some tensors [long, r]: how many, and for each tensor which.

    Shapes: ranks [C]; own [C, r] of each tensor. Both sides draw `own` from the round's seed.
    """

    ranks: IntArray
    own: Mapping[str, BoolArray]


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

    def take(self, place: int) -> TensorUpdate:
        """Return one client's tensors in its own columns."""
        tensors = {name: values[place][self._own(name, place)] for name, values in self.changes.items()}
        rank = 0 if self.columns is None else int(self.columns.ranks[place])
        return TensorUpdate(tensors, int(self.examples[place]), rank)

    def put(self, place: int, received: Tensors) -> None:
        """Store the tensors that the server decoded of one client."""
        for name, values in received.items():
            self.received[name][place, ...][self._own(name, place)] = values

    def _own(self, name: str, place: int) -> tuple[slice, BoolArray] | tuple[()]:
        return (
            () if self.columns is None or name not in self.columns.own else (slice(None), self.columns.own[name][place])
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


def send_tensors(
    chunk: Chunk,
    task: Task,
    updates: LocalUpdates,
    coding: TensorCoding,
    columns: Columns | None = None,
    max_ranks: IntArray | None = None,
) -> tuple[Tensors, Uploads]:
    """Send each client's changes; return what the server decodes of them [C, ...], and what was sent.

    Clients without examples send nothing, nor do clients of rank 0 if there are `columns`. A client whose budget does
    not allow its upload sends nothing and pays nothing; one whose upload is lost has paid. `max_ranks` [C] bounds the
    ranks that the wire chooses.
    """
    finite = finite_clients(updates)
    examples = task.data.examples[chunk.clients]
    sends = examples > 0
    if columns is not None:
        sends = sends & (columns.ranks > 0)
    ranks = max_ranks if columns is None else columns.ranks
    if not coding.codec.stages:
        return updates.changes, _send_whole(chunk, updates.changes, columns, sends, finite)
    view = TensorView(updates.changes, examples, finite, sends, columns, ranks)
    typed = replace(coding, codec=coding.codec.of(dtype_of(updates.changes)))
    uploads = send_each(chunk, task, typed, view)
    return view.received, uploads


def finite_clients(updates: LocalUpdates) -> BoolArray:
    """Return the clients whose training stayed finite, [C]."""
    finite = np.isfinite(updates.loss)
    arrays = (*updates.changes.values(), *updates.state.values())
    if not all_finite(*arrays):
        for values in arrays:
            finite &= np.isfinite(values).reshape(len(values), -1).all(axis=1)
    return finite


def _send_whole(
    chunk: Chunk, changes: Tensors, columns: Columns | None, sends: BoolArray, finite: BoolArray
) -> Uploads:
    """Send all values as they are; an update that is not finite is sent and paid for, and does not count."""
    own = {} if columns is None else columns.own
    whole = sum(prod(values.shape[1:]) for name, values in changes.items() if name not in own)
    n_values = np.full(len(sends), whole)
    for name in own.keys() & changes.keys():
        n_values += changes[name].shape[1] * own[name].sum(axis=1)
    bits = dense_wire_bits(n_values, dtype_of(changes))
    sends = sends & chunk.affords(bits)
    ranks = None if columns is None else columns.ranks
    return Uploads(np.where(sends, bits, 0), sends & finite & chunk.arrives(), finite, {}, ranks)
