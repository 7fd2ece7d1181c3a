"""Whole tensors that a chunk's clients send, in float32 or through a codec, within their budgets."""

from __future__ import annotations

import numpy as np

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.dense import dense_wire_bits
from narrowcast.algorithms.uploads.client_loop import Coding, Uploads, send_each
from narrowcast.algorithms.uploads.tensor_view import Columns, TensorCoding, Tensors, TensorView, send_coded_tensors
from narrowcast.platform.contracts import Task
from narrowcast.platform.types import BoolArray, Chunk, IntArray, LocalUpdates


def tensor_coding(codec: Codec) -> TensorCoding:
    """Return how tensors are coded; in float32 if the codec has no stages."""
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
        return updates.changes, _send_float32(chunk, updates.changes, columns, sends, finite)
    view = TensorView(updates.changes, examples, finite, sends, columns, ranks)
    uploads = send_each(chunk, task, coding, view)
    return view.received, uploads


def finite_clients(updates: LocalUpdates) -> BoolArray:
    """Return the clients whose training stayed finite, [C]."""
    finite = np.isfinite(updates.loss)
    for values in (*updates.changes.values(), *updates.state.values()):
        finite &= np.isfinite(values).reshape(len(values), -1).all(axis=1)
    return finite


def _send_float32(
    chunk: Chunk, changes: Tensors, columns: Columns | None, sends: BoolArray, finite: BoolArray
) -> Uploads:
    """Send all values in float32; an update that is not finite is sent and paid for, and does not count."""
    n_values = np.zeros(len(sends), dtype=np.int64)
    for name, values in changes.items():
        if columns is not None and name in columns.own:
            n_values += values.shape[1] * columns.own[name].sum(axis=1)
        else:
            n_values += values[0].size
    bits = dense_wire_bits(0) + 32 * n_values
    sends = sends & chunk.affords(bits)
    ranks = None if columns is None else columns.ranks
    return Uploads(np.where(sends, bits, 0), sends & finite & chunk.arrives(), finite, {}, ranks)
