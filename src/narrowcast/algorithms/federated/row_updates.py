"""Updates that are rows of the item matrix: what each client sends, what it weighs, and how they are averaged."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.rows import RowLayout, rows_wire_bits
from narrowcast.algorithms.local_training.fused import FusedResult
from narrowcast.algorithms.local_training.streams import ChunkSamples
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.matrix_factorisation import USER_FACTORS, MatrixFactorisation
from narrowcast.platform.types import Arrays, BoolArray, Chunk, ChunkResult, ClientLedger, IntArray

Aggregation = Literal["per_item_mean", "weighted"]
"""`per_item_mean` divides each row by the number of clients that touched it, as the code released with CoLR does (each
client's row mask is then sent and paid for); `weighted` is sum N_u A_u / sum N_u over the cohort, Algorithm 1."""

SUM, WEIGHT = "sum", "weight"


def only_factorisation(kind: str, task: Task) -> None:
    """Raise a `UserError` where the model is no matrix factorisation."""
    if not isinstance(task.model, MatrixFactorisation):
        raise UserError(
            f'algorithm.kind = "{kind}" trains matrix_factorisation, not {task.model.kind}; use fedavg, colr or scolr'
        )


def client_factors(aggregation: Aggregation, examples: IntArray, components: BoolArray) -> NDArray[np.float32]:
    """What each client's rows are multiplied by in the sum, [C]; 0 for one that sends no column."""
    factors = examples if aggregation == "weighted" else np.ones(len(examples))
    return np.where(components.any(axis=1), factors, 0).astype(np.float32)


def finish_chunk(
    task: Task,
    chunk: Chunk,
    samples: ChunkSamples,
    result: FusedResult,
    components: BoolArray,
    aggregation: Aggregation,
    layout: RowLayout,
) -> ChunkResult:
    """Turn what a chunk trained into payload weights, a partial sum, new user factors and a ledger.

    Shapes: components [C, k] in the order of `samples.order`: the columns of its rows that each client sends.
    A client whose training left the finite numbers is not delivered and keeps its former user factors; one that sends
    no column is not delivered but keeps what it learnt.
    """
    ranks = components.sum(axis=1)
    delivered = result.finite & (ranks > 0)
    sent_rows = np.diff(samples.row_starts)
    mask = aggregation == "per_item_mean"
    bits = rows_wire_bits(n_rows=task.data.n_items, sent_rows=sent_rows, rank=ranks, layout=layout, mask=mask)
    if aggregation == "weighted":
        examples = task.data.examples[chunk.clients[samples.order]]
        weight = np.array([[examples[delivered].sum()]], dtype=np.float64)
    else:
        weight = result.touched[:, None]

    place = np.empty(len(samples.order), dtype=np.int64)
    place[samples.order] = np.arange(len(place))
    before = np.asarray(chunk.state[USER_FACTORS])
    return ChunkResult(
        index=chunk.index,
        partial={SUM: result.total, WEIGHT: weight},
        state={USER_FACTORS: np.where(result.finite[place, None], result.user_factors[place], before)},
        ledger=ClientLedger(
            client=chunk.clients,
            rank=ranks[place],
            uplink_bits=(bits * (ranks > 0))[place],
            examples=samples.samples[place] * task.training.epochs,
            loss=result.loss[place],
            delivered=delivered[place],
        ),
    )


def mean_change(total: Arrays) -> NDArray[np.float32]:
    """The averaged change of every row, [N, k]; zero where nobody sent anything."""
    weight = np.asarray(total[WEIGHT], dtype=np.float64)
    return (np.asarray(total[SUM]) / np.maximum(weight, 1.0)).astype(np.float32)


def changed_rows(total: Arrays) -> BoolArray:
    """The rows that the average changes, [N]."""
    return np.asarray(np.any(np.asarray(total[SUM]) != 0, axis=1))
