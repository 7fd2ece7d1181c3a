"""Updates that are rows of the item matrix: what each client sends, what it weighs, and how they are averaged."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.rows import RowLayout, RowsPayload
from narrowcast.algorithms.local_training.batches import ChunkBatches
from narrowcast.algorithms.local_training.factorisation import LocalResult
from narrowcast.platform.contracts import Task
from narrowcast.platform.models.matrix_factorisation import USER_FACTORS
from narrowcast.platform.types import Arrays, BoolArray, Chunk, ChunkResult, ClientLedger, IntArray

Aggregation = Literal["per_item_mean", "weighted"]
"""`per_item_mean` divides each row by the number of clients that touched it, as the code released with CoLR does (each
client's row mask is then sent and paid for); `weighted` is sum N_u A_u / sum N_u over the cohort, Algorithm 1."""

SUM, WEIGHT = "sum", "weight"


def finish_chunk(
    task: Task,
    chunk: Chunk,
    batches: ChunkBatches,
    result: LocalResult,
    components: BoolArray,
    aggregation: Aggregation,
    layout: RowLayout,
) -> ChunkResult:
    """Turn what a chunk trained into payload weights, a partial sum, new user factors and a ledger.

    Shapes: components [C, k] in the order of `batches.order`: the columns of its rows that each client sends.
    A client whose training left the finite numbers is not delivered and keeps its former user factors; one that sends
    no column is not delivered but keeps what it learnt.
    """
    changes, user_factors = result.row_changes.numpy(), result.user_factors.numpy()
    n_clients = len(batches.order)
    client_of_row = np.repeat(np.arange(n_clients), np.diff(batches.row_starts))
    ranks = components.sum(axis=1)
    bad_rows = ~np.isfinite(changes).all(axis=1)
    finite = np.isfinite(user_factors).all(axis=1)
    finite &= np.bincount(client_of_row[bad_rows], minlength=n_clients) == 0
    delivered = finite & (ranks > 0)
    payloads = client_payloads(task, chunk, batches, changes, components, aggregation, layout)
    bits = np.array([payload.wire_bits() for payload in payloads], dtype=np.int64) * (ranks > 0)

    place = np.empty(n_clients, dtype=np.int64)
    place[batches.order] = np.arange(n_clients)
    before = np.asarray(chunk.state[USER_FACTORS])
    after = np.where(finite[place, None], user_factors[place], before)
    return ChunkResult(
        index=chunk.index,
        partial=partial_sum(
            aggregation, task.data.n_items, batches.row_items, changes, client_of_row,
            task.data.examples[chunk.clients[batches.order]], delivered,
        ),
        state={USER_FACTORS: after},
        ledger=ClientLedger(
            client=chunk.clients,
            rank=ranks[place],
            uplink_bits=bits[place],
            examples=batches.samples[place] * task.training.epochs,
            loss=result.loss.numpy().astype(np.float64)[place],
            delivered=delivered[place],
        ),
    )  # fmt: skip


def client_payloads(
    task: Task,
    chunk: Chunk,
    batches: ChunkBatches,
    changes: NDArray[np.float32],
    components: BoolArray,
    aggregation: Aggregation,
    layout: RowLayout,
) -> list[RowsPayload]:
    """What each client of the chunk sends, in the order of `batches.order`; `changes` is [R, k]."""
    payloads = []
    examples = task.data.examples[chunk.clients[batches.order]]
    for client, (start, stop) in enumerate(zip(batches.row_starts, batches.row_starts[1:], strict=False)):
        values = changes[start:stop]
        if not components[client].all():
            values = values[:, components[client]]
        rows = batches.row_items[start:stop]
        mask = aggregation == "per_item_mean"
        payloads.append(RowsPayload(task.data.n_items, rows, values, layout, mask, int(examples[client])))
    return payloads


def partial_sum(
    aggregation: Aggregation,
    n_rows: int,
    rows: IntArray,
    changes: NDArray[np.float32],
    client_of_row: IntArray,
    examples: IntArray,
    delivered: BoolArray,
) -> Arrays:
    """Sum the delivered clients' rows in client order.

    Shapes: rows, client_of_row [R]; changes [R, k]; examples, delivered [C]. Returns `sum` [N, k] and `weight`: [N, 1]
    clients that touched each row, or [1, 1] examples.
    """
    if not delivered.all():
        kept = delivered[client_of_row]
        rows, changes, client_of_row = rows[kept], changes[kept], client_of_row[kept]
    if aggregation == "weighted":
        changes = changes * examples[client_of_row, None].astype(np.float32)
        weight = np.array([[examples[delivered].sum()]], dtype=np.float64)
    else:
        weight = np.bincount(rows, minlength=n_rows)[:, None].astype(np.float64)
    total = np.zeros((n_rows, changes.shape[1]), dtype=np.float32)
    starts = np.flatnonzero(np.diff(client_of_row, prepend=-1))
    for start, stop in pairwise([*starts, len(rows)]):
        total[rows[start:stop]] += changes[start:stop]  # the rows of one client are distinct
    return {SUM: total, WEIGHT: weight}


def mean_change(total: Arrays) -> NDArray[np.float32]:
    """The averaged change of every row, [N, k]; zero where nobody sent anything."""
    weight = np.asarray(total[WEIGHT], dtype=np.float64)
    return (np.asarray(total[SUM]) / np.maximum(weight, 1.0)).astype(np.float32)


def changed_rows(total: Arrays) -> BoolArray:
    """The rows that the average changes, [N]."""
    return np.asarray(np.any(np.asarray(total[SUM]) != 0, axis=1))
