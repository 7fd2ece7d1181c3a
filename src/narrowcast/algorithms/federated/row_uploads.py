"""What clients send of the rows they trained, in float32 or through a codec, within their budgets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.coded_rows import decode_rows, encode_rows
from narrowcast.algorithms.codecs.error_feedback import memory_of_rows, with_memory_of_rows
from narrowcast.algorithms.codecs.stage import UnsendableUpdateError
from narrowcast.algorithms.federated.codec_state import as_client_state, codec_state
from narrowcast.algorithms.local_training.batches import likely_rows
from narrowcast.algorithms.local_training.fused import FusedResult
from narrowcast.algorithms.local_training.row_sum import sum_rows
from narrowcast.algorithms.local_training.streams import ChunkSamples
from narrowcast.platform.contracts import Task
from narrowcast.platform.seeds import stream_keys
from narrowcast.platform.types import Arrays, BoolArray, Chunk, FloatArray, IntArray


@dataclass(frozen=True)
class Uploads:
    """What the clients of a chunk send, in the order of `ChunkSamples.order`.

    Shapes: total [N, k] and touched [N], as in `FusedResult`, of what the server decodes of the delivered; bits and
    delivered [C], no bits where nothing is sent; state, what a codec keeps on each client [C, ...].
    """

    total: NDArray[np.float32]
    touched: FloatArray
    bits: IntArray
    delivered: BoolArray
    state: Arrays


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
    task: Task,
    chunk: Chunk,
    samples: ChunkSamples,
    result: FusedResult,
    components: BoolArray,
    factors: NDArray[np.float32],
    codec: Codec,
    levels: IntArray | None = None,
) -> Uploads:
    """Rows through a codec, at the finest levels that a client's budget allows; whom none fit sends nothing.

    Shapes: components [C, k], the columns that each client sends, and factors [C] as in `FusedResult`.
    """
    assert result.row_changes is not None, "train with keep_changes"
    n_clients, n_items = len(samples.order), task.data.n_items
    decoded = np.zeros_like(result.row_changes)
    bits, sent = np.zeros(n_clients, dtype=np.int64), np.zeros(n_clients, dtype=bool)
    keys = stream_keys(task.seed, "codec", chunk.round_index, chunk.clients[samples.order])
    state = {name: values[samples.order] for name, values in codec_state(chunk.state).items()}
    can_send = result.finite & components.any(axis=1)
    for client, budget in zip(np.flatnonzero(can_send), budgets(chunk, samples)[can_send], strict=True):
        own = slice(samples.row_starts[client], samples.row_starts[client + 1])
        rows, columns, key = samples.row_items[own], np.flatnonzero(components[client]), int(keys[client])
        changes = result.row_changes[own][:, columns]
        kept = {name: values[client] for name, values in state.items()}
        before = memory_of_rows(kept, rows)
        drawn = int(samples.positives[client]) * task.training.negatives
        likely = likely_rows(n_items, drawn, task.seed, chunk.round_index, int(chunk.clients[samples.order[client]]))
        try:
            chosen = codec if levels is None else codec.with_levels(int(levels[client]))
            fitting = encode_rows(chosen, rows, changes, likely, key, state=before, budget_bits=float(budget))
        except UnsendableUpdateError:
            continue
        if fitting is None:
            continue
        payload, after = fitting
        bits[client], sent[client] = payload.wire_bits(), True
        for name, values in with_memory_of_rows(kept, rows, after).items():
            state[name][client] = values
        _, received = decode_rows(codec, payload.to_bytes(), likely, len(columns), key, stateful=bool(state))
        decoded[own.start : own.stop, columns] = received
    delivered = sent & chunk.arrives()[samples.order]
    total, touched = sum_rows(n_items, samples.row_items, samples.row_starts, decoded, factors, delivered)
    return Uploads(total, touched, bits, delivered, as_client_state(state))
