"""Updates that are rows of the item matrix: what each client sends, what it weighs, and how they are averaged."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.rows import RowLayout, rows_wire_bits
from narrowcast.algorithms.codecs.stages import Stages
from narrowcast.algorithms.federated.row_uploads import (
    Aggregation,
    Sending,
    Uploads,
    coded_uploads,
    counted,
    plain_uploads,
)
from narrowcast.algorithms.local_training.fused import FusedResult
from narrowcast.algorithms.local_training.row_sum import sum_rows
from narrowcast.algorithms.local_training.streams import ChunkSamples
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.matrix_factorisation import USER_FACTORS, MatrixFactorisation
from narrowcast.platform.types import Arrays, BoolArray, Chunk, ChunkResult, ClientLedger, IntArray

SUM, WEIGHT = "sum", "weight"


def only_factorisation(kind: str, task: Task) -> None:
    """Raise a `UserError` where the model is no matrix factorisation."""
    if not isinstance(task.model, MatrixFactorisation):
        raise UserError(
            f'algorithm.kind = "{kind}" trains matrix_factorisation, not {task.model.kind}; use fedavg, colr or scolr'
        )


def only_touched_rows_are_coded(codec: Stages, layout: RowLayout) -> None:
    """Raise a `UserError` where every row of low-rank components is to be sent through a codec."""
    if codec and layout != "touched":
        raise UserError('algorithm.codec sends touched rows; leave out algorithm.rows = "all"')


def client_factors(aggregation: Aggregation, examples: IntArray, components: BoolArray) -> NDArray[np.float32]:
    """What each client's rows are multiplied by in the sum, [C]; 0 for one that sends no column."""
    factors = examples if aggregation == "weighted" else np.ones(len(examples))
    return np.where(components.any(axis=1), factors, 0).astype(np.float32)


def train_and_send(
    how: Sending,
    task: Task,
    chunk: Chunk,
    samples: ChunkSamples,
    components: BoolArray,
    train: Callable[[NDArray[np.float32], bool], FusedResult],
) -> ChunkResult:
    """Train a chunk and send what it learnt; `train` gets the clients' factors [C] and whether to keep their changes.

    Shapes: components [C, k] in the order of `samples.order`: the columns of its rows that each client sends.
    """
    factors = client_factors(how.aggregation, task.data.examples[chunk.clients[samples.order]], components)
    if how.codec.stages:
        result = train(factors, True)
        began = time.perf_counter()
        uploads = coded_uploads(how, task, chunk, samples, result, components, factors)
    else:
        ranks = components.sum(axis=1)
        bits = plain_bits(task, samples, ranks, how.aggregation, how.layout)
        result = train(factors * counted(chunk, samples, ranks, bits), False)
        began = time.perf_counter()
        uploads = plain_uploads(chunk, samples, result, ranks, bits)
    return finish_chunk(task, chunk, samples, result, components, how.aggregation, uploads).encoded_since(began)


def plain_bits(
    task: Task, samples: ChunkSamples, ranks: IntArray, aggregation: Aggregation, layout: RowLayout
) -> IntArray:
    """What each client's rows weigh in float32, known before training; ranks and bits [C], or [C, ...]."""
    sent_rows = np.diff(samples.row_starts).reshape(-1, *[1] * (ranks.ndim - 1))
    mask = aggregation != "weighted"
    return np.asarray(
        rows_wire_bits(n_rows=task.data.n_items, sent_rows=sent_rows, rank=ranks, layout=layout, mask=mask)
    )


def finish_chunk(
    task: Task,
    chunk: Chunk,
    samples: ChunkSamples,
    result: FusedResult,
    components: BoolArray,
    aggregation: Aggregation,
    uploads: Uploads,
) -> ChunkResult:
    """Turn what a chunk trained and sent into a partial sum, new user factors and a ledger.

    Shapes: components [C, k] in the order of `samples.order`: the columns of its rows that each client sends.
    A client whose training left the finite numbers keeps its former user factors; one that sends nothing is not
    delivered but keeps what it learnt.
    """
    ranks, delivered = components.sum(axis=1) if uploads.ranks is None else uploads.ranks, uploads.delivered
    if aggregation == "weighted":
        examples = task.data.examples[chunk.clients[samples.order]]
        weight = np.array([[examples[delivered].sum()]], dtype=np.float64)
    elif aggregation == "per_component_mean":
        sent = components[np.repeat(np.arange(len(components)), np.diff(samples.row_starts))].astype(np.float32)
        ones = np.ones(len(components), dtype=np.float32)
        entries, _ = sum_rows(task.data.n_items, samples.row_items, samples.row_starts, sent, ones, delivered)
        weight = entries.astype(np.float64)
    else:
        weight = uploads.touched[:, None]

    place = np.empty(len(samples.order), dtype=np.int64)
    place[samples.order] = np.arange(len(place))
    before = np.asarray(chunk.state[USER_FACTORS])
    return ChunkResult(
        index=chunk.index,
        partial={SUM: uploads.total, WEIGHT: weight},
        state={
            USER_FACTORS: np.where(result.finite[place, None], result.user_factors[place], before),
            **{name: values[place] for name, values in uploads.state.items()},
        },
        ledger=ClientLedger(
            client=chunk.clients,
            rank=np.where(uploads.bits > 0, ranks, 0)[place],
            uplink_bits=uploads.bits[place],
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
