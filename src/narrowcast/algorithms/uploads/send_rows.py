"""The client half of algorithms that send rows of the item matrix: train a chunk, send what changed, add it up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.rows import RowLayout, rows_wire_bits
from narrowcast.algorithms.local_training.cohort import RowCohort
from narrowcast.algorithms.local_training.fused import FusedResult
from narrowcast.algorithms.local_training.row_sum import sum_rows
from narrowcast.algorithms.uploads.aggregation import Aggregation, row_weights
from narrowcast.algorithms.uploads.chunk_results import chunk_result
from narrowcast.algorithms.uploads.client_loop import Uploads, send_each
from narrowcast.algorithms.uploads.partial_sums import RowSum
from narrowcast.algorithms.uploads.row_view import RowCoding, RowView
from narrowcast.platform.models.matrix_factorisation import USER_FACTORS
from narrowcast.platform.types import BoolArray, ChunkResult, IntArray, LocalUpdates

TrainRows = Callable[[NDArray[np.float32], bool], FusedResult]
"""Trains a chunk, given the clients' weights in the sum [C] and whether to keep each client's changes."""


@dataclass(frozen=True)
class RowSending:
    """Settings with which an algorithm's clients send rows; in float32 if the codec has no stages."""

    aggregation: Aggregation
    layout: RowLayout
    coding: RowCoding


def train_and_send_rows(sending: RowSending, cohort: RowCohort, columns: BoolArray, train: TrainRows) -> ChunkResult:
    """Train a chunk's clients and send their rows, each in its own columns [C, k].

    In float32 the size of an upload is known before the training, which then adds up the changes of the clients whose
    uploads will arrive and keeps none of them. Through a codec the changes are kept, sent and decoded one by one.
    """
    chunk, task, samples = cohort.chunk, cohort.task, cohort.samples
    ranks = columns.sum(axis=1)
    weights = row_weights(sending.aggregation, task, chunk, ranks)
    if sending.coding.codec.stages:
        result = train(weights, True)
        began = time.perf_counter()
        assert result.row_changes is not None, "they were to be kept"
        finite, touched_only = result.finite[cohort.places], sending.layout == "touched"
        view = RowView(cohort, result.row_changes, columns, finite, touched_only)
        uploads = send_each(chunk, task, sending.coding, view)
        delivered = uploads.delivered[samples.order]
        total, touched = sum_rows(
            *(task.data.n_items, samples.row_items, samples.row_starts),
            *(view.received, weights[samples.order], delivered),
        )
    else:
        bits = float_bits(cohort, ranks, sending.aggregation, sending.layout)
        sends = (ranks > 0) & chunk.affords(bits)
        arrives = sends & chunk.arrives()
        result = train(weights * arrives, False)
        began = time.perf_counter()
        finite = result.finite[cohort.places]
        uploads = Uploads(bits * sends, finite & arrives, finite, {}, ranks)
        total, touched = result.total, result.touched
    weight = _divisor(sending.aggregation, cohort, columns, uploads.delivered, touched)
    updates = _local_updates(cohort, result)
    return chunk_result(chunk, updates, uploads, RowSum(total, weight).arrays()).encoded_since(began)


def float_bits(cohort: RowCohort, ranks: IntArray, aggregation: Aggregation, layout: RowLayout) -> IntArray:
    """Return the size of each client's rows in float32, known before the training; ranks and bits [C], or [C, ...]."""
    sent_rows = cohort.n_rows.reshape(-1, *[1] * (ranks.ndim - 1))
    mask = aggregation != "weighted"
    return np.asarray(
        rows_wire_bits(n_rows=cohort.task.data.n_items, sent_rows=sent_rows, rank=ranks, layout=layout, mask=mask)
    )


def _divisor(
    aggregation: Aggregation,
    cohort: RowCohort,
    columns: BoolArray,
    delivered: BoolArray,
    touched: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return what the delivered rows are divided by: [1, 1], [N, k] or [N, 1]."""
    if aggregation == "weighted":
        examples = cohort.task.data.examples[cohort.chunk.clients]
        return np.array([[examples[delivered].sum()]], dtype=np.float64)
    if aggregation == "per_item_mean":
        return touched[:, None]
    samples = cohort.samples
    order = samples.order
    sent = columns[order][np.repeat(np.arange(len(order)), np.diff(samples.row_starts))].astype(np.float32)
    ones = np.ones(len(order), dtype=np.float32)
    entries, _ = sum_rows(
        *(cohort.task.data.n_items, samples.row_items, samples.row_starts),
        *(sent, ones, delivered[order]),
    )
    return entries.astype(np.float64)


def _local_updates(cohort: RowCohort, result: FusedResult) -> LocalUpdates:
    """Return what the clients learnt for themselves, in the order of the chunk."""
    places, training = cohort.places, cohort.task.training
    n_samples = cohort.samples.samples[places]
    return LocalUpdates(
        changes={},
        state={USER_FACTORS: result.user_factors[places]},
        loss=result.loss[places],
        examples=n_samples * training.epochs,
        steps=-(-n_samples // training.batch_size) * training.epochs,
    )
