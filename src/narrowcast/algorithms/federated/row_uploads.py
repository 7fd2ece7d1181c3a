"""What clients send of the rows they trained, in float32 or through a codec, within their budgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.coded_rows import decode_rows, encode_rows
from narrowcast.algorithms.codecs.error_feedback import memory_of_rows, with_memory_of_rows
from narrowcast.algorithms.codecs.rows import RowLayout
from narrowcast.algorithms.codecs.stage import UnsendableUpdateError
from narrowcast.algorithms.codecs.whole_matrix import decode_matrix, encode_matrix
from narrowcast.algorithms.federated.codec_state import as_client_state, codec_state
from narrowcast.algorithms.federated.own_basis import encode_in_own_basis
from narrowcast.algorithms.local_training.batches import likely_rows
from narrowcast.algorithms.local_training.fused import FusedResult
from narrowcast.algorithms.local_training.row_sum import sum_rows
from narrowcast.algorithms.local_training.streams import ChunkSamples
from narrowcast.platform.contracts import Task
from narrowcast.platform.seeds import stream_keys
from narrowcast.platform.types import Arrays, BoolArray, Chunk, FloatArray, IntArray

Aggregation = Literal["per_item_mean", "per_component_mean", "weighted"]
"""What a row's sum is divided by.

`per_item_mean`: the number of clients that touched it, as the code released with CoLR does (each client's row mask is
then sent and paid for). `per_component_mean`: for each entry of A, the clients that sent that component of the row, so
that low ranks do not shrink the mean. `weighted`: sum N_u A_u / sum N_u over the cohort, Algorithm 1.
"""


@dataclass(frozen=True)
class Sending:
    """How an algorithm's clients send rows: its fields, and the levels [C] that the codec tries first, if any.

    With an `own_rank` each client sends its change in a basis of its own, at that rank or less.
    """

    aggregation: Aggregation
    layout: RowLayout
    codec: Codec
    levels: IntArray | None = None
    own_rank: int | None = None


@dataclass(frozen=True)
class Uploads:
    """What the clients of a chunk send, in the order of `ChunkSamples.order`.

    Shapes: total [N, k] and touched [N], as in `FusedResult`, of what the server decodes of the delivered; bits and
    delivered [C], no bits where nothing is sent; state, what a codec keeps on each client [C, ...]; ranks [C], where
    clients chose them after their training.
    """

    total: NDArray[np.float32]
    touched: FloatArray
    bits: IntArray
    delivered: BoolArray
    state: Arrays
    ranks: IntArray | None = None


def plain_uploads(chunk: Chunk, samples: ChunkSamples, result: FusedResult, ranks: IntArray, bits: IntArray) -> Uploads:
    """Rows in float32; the sums are those of the training, from which `counted` kept whoever does not deliver.

    Shapes: ranks and bits [C] in the order of `samples.order`.
    """
    sends = (ranks > 0) & (bits <= budgets(chunk, samples))
    return Uploads(result.total, result.touched, bits * sends, result.finite & counted(chunk, samples, ranks, bits), {})


def counted(chunk: Chunk, samples: ChunkSamples, ranks: IntArray, bits: IntArray) -> BoolArray:
    """Whose rows in float32 will reach the server unless their training diverges, known before it, [C]."""
    return (ranks > 0) & (bits <= budgets(chunk, samples)) & chunk.arrives()[samples.order]


def budgets(chunk: Chunk, samples: ChunkSamples) -> FloatArray:
    """What each client may send in bits, infinite where nothing limits it, [C] in the order of `samples.order`."""
    if chunk.budget_bits is None:
        return np.full(len(samples.order), np.inf)
    return chunk.budget_bits[samples.order].astype(np.float64)


def coded_uploads(
    how: Sending,
    task: Task,
    chunk: Chunk,
    samples: ChunkSamples,
    result: FusedResult,
    components: BoolArray,
    factors: NDArray[np.float32],
) -> Uploads:
    """Rows through a codec, at the finest levels that a client's budget allows; whom none fit sends nothing.

    With the layout `all` the codec sees the whole matrix, untouched rows too, and keeps nothing on the client.
    Shapes: components [C, k], the columns that each client sends, and factors [C] as in `FusedResult`.
    """
    assert result.row_changes is not None, "train with keep_changes"
    n_clients, n_items = len(samples.order), task.data.n_items
    decoded = np.zeros_like(result.row_changes)
    bits, ranks = np.zeros(n_clients, dtype=np.int64), components.sum(axis=1)
    sent = np.zeros(n_clients, dtype=bool)
    keys = stream_keys(task.seed, "codec", chunk.round_index, chunk.clients[samples.order])
    state = {name: values[samples.order] for name, values in codec_state(chunk.state).items()}
    can_send = result.finite & components.any(axis=1)
    for client, budget in zip(np.flatnonzero(can_send), budgets(chunk, samples)[can_send], strict=True):
        own = slice(samples.row_starts[client], samples.row_starts[client + 1])
        rows, columns, key = samples.row_items[own], np.flatnonzero(components[client]), int(keys[client])
        changes = result.row_changes[own][:, columns]
        kept = {name: values[client] for name, values in state.items()}
        try:
            chosen = how.codec if how.levels is None else how.codec.with_levels(int(how.levels[client]))
            if how.layout == "all":
                sending = _send_matrix(chosen, rows, changes, n_items, key, float(budget))
            else:
                drawn = int(samples.positives[client]) * task.training.negatives
                one = int(chunk.clients[samples.order[client]])
                likely = likely_rows(n_items, drawn, task.seed, chunk.round_index, one)
                if how.own_rank is not None:
                    sending = _send_in_own_basis(chosen, rows, changes, likely, key, float(budget), how.own_rank)
                else:
                    sending = _send_rows(chosen, rows, changes, likely, key, kept, float(budget))
        except UnsendableUpdateError:
            continue
        if sending is None:
            continue
        bits[client], sent[client] = sending.bits, True
        ranks[client] = ranks[client] if sending.rank is None else sending.rank
        decoded[own.start : own.stop, columns] = sending.received
        for name, values in sending.state.items():
            state[name][client] = values
    delivered = sent & chunk.arrives()[samples.order]
    total, touched = sum_rows(n_items, samples.row_items, samples.row_starts, decoded, factors, delivered)
    return Uploads(total, touched, bits, delivered, as_client_state(state), ranks)


@dataclass(frozen=True)
class _Sending:
    """What one client sends: its weight, the rows [m, k] that the server decodes, the client's state after it.

    `rank` is given where the client chose it.
    """

    bits: int
    received: NDArray[np.float32]
    state: Arrays
    rank: int | None = None


def _send_rows(
    codec: Codec,
    rows: IntArray,
    changes: NDArray[np.float32],
    likely: BoolArray,
    key: int,
    kept: Arrays,
    budget_bits: float,
) -> _Sending | None:
    """The touched rows alone."""
    before = memory_of_rows(kept, rows)
    fitting = encode_rows(codec, rows, changes, likely, key, state=before, budget_bits=budget_bits)
    if fitting is None:
        return None
    payload, after = fitting
    _, received = decode_rows(codec, payload.to_bytes(), likely, changes.shape[1], key)
    return _Sending(payload.wire_bits(), received, with_memory_of_rows(kept, rows, after))


def _send_in_own_basis(
    codec: Codec,
    rows: IntArray,
    changes: NDArray[np.float32],
    likely: BoolArray,
    key: int,
    budget_bits: float,
    most: int,
) -> _Sending | None:
    """The touched rows in a basis that is sent with them."""
    fitting = encode_in_own_basis(codec, rows, changes, likely, key, most=most, budget_bits=budget_bits)
    if fitting is None:
        return None
    payload, rank = fitting
    _, received = decode_rows(codec, payload.to_bytes(), likely, most, key, dimension=changes.shape[1])
    return _Sending(payload.wire_bits(), received, {}, rank)


def _send_matrix(
    codec: Codec, rows: IntArray, changes: NDArray[np.float32], n_rows: int, key: int, budget_bits: float
) -> _Sending | None:
    """The whole matrix; what the codec makes of the rows that were not touched is not used."""
    payload = encode_matrix(codec, rows, changes, n_rows, key, budget_bits=budget_bits)
    if payload is None:
        return None
    _, received = decode_matrix(codec, payload.to_bytes(), n_rows, changes.shape[1], key)
    return _Sending(payload.wire_bits(), received, {})
