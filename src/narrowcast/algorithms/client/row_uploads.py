"""Uploads that are rows of the item matrix: train a chunk, send each client's rows, and add them up.

Uploads of the rows of W that clients changed: as a whole matrix, or the rows of their entries alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.client.sums import Aggregation, RowSum, row_weights
from narrowcast.algorithms.client.uploads import (
    Coding,
    Uploads,
    chunk_result,
    send_each,
    send_touched_rows,
    send_whole_matrix,
)
from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.messages import (
    RowLayout,
    RowUpdate,
    rows_wire_bits,
)
from narrowcast.algorithms.local_training.factorisation import RowCohort
from narrowcast.algorithms.local_training.factorisation_kernels import FusedResult, sum_rows
from narrowcast.algorithms.local_training.negatives import SharedNegatives
from narrowcast.platform.models.model import USER_FACTORS
from narrowcast.platform.types import BoolArray, ChunkResult, IntArray, LocalUpdates

Rows = NDArray[np.float32]
RowCoding = Coding[RowUpdate, Rows]


@dataclass(frozen=True)
class RowView:
    """Each client's rows of the changes, in the columns that it sends.

    Shapes: changes [R, k], and `received` likewise; columns [C, k]; finite [C].
    """

    cohort: RowCohort
    changes: Rows
    columns: BoolArray
    finite: BoolArray
    received: Rows = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "received", np.zeros_like(self.changes))

    @property
    def ranks(self) -> IntArray:
        """The number of columns that each client sends, [C]."""
        return self.columns.sum(axis=1)

    @property
    def sends(self) -> BoolArray:
        """The clients that send a column, [C]."""
        return np.asarray(self.columns.any(axis=1))

    def take(self, index: int) -> RowUpdate:
        """Return one client's rows in its own columns."""
        cohort, span, columns = self.cohort, self.cohort.rows(index), self._columns(index)
        rows, changes = cohort.samples.row_items[span], self.changes[span][:, columns]
        client, task, likely = int(cohort.chunk.clients[index]), cohort.task, None
        if task.training.shared_negatives:
            likely = SharedNegatives.of(task, client, cohort.chunk.round_index).likely_rows
        return RowUpdate(rows, changes, task.data.n_items, int(cohort.positives[index]), likely)

    def put(self, index: int, received: Rows) -> None:
        """Store the rows that the server decoded of one client."""
        span = self.cohort.rows(index)
        self.received[span.start : span.stop, self._columns(index)] = received

    def _columns(self, index: int) -> IntArray | slice:
        """Return the columns that a client sends; a slice, which copies nothing, if these are all."""
        columns = np.flatnonzero(self.columns[index])
        return slice(None) if len(columns) == self.columns.shape[1] else columns


def row_coding(codec: Codec, layout: RowLayout, first_levels: IntArray | None = None) -> RowCoding:
    """Return how rows are coded: the touched ones alone, or the whole matrix."""
    return Coding(codec, send_touched_rows if layout == "touched" else send_whole_matrix, first_levels)


TrainRows = Callable[[NDArray[np.float32], bool], FusedResult]
"""Trains a chunk, given the clients' weights in the sum [C] and whether to keep each client's changes."""


@dataclass(frozen=True)
class RowCall:
    """The training of a chunk's clients on the rows of Q that they touch, and the upload of the rows.

    `columns` [C, k] are those that each client trains and sends. Rows go in float32 if the codec has no stages. With
    `some_rows` the wire may omit rows: they come back as NaN and are not averaged.
    """

    cohort: RowCohort
    columns: BoolArray
    train: TrainRows
    coding: RowCoding
    some_rows: bool = False


def train_and_send_rows(call: RowCall, aggregation: Aggregation, layout: RowLayout) -> ChunkResult:
    """Train a chunk's clients and send their rows, each in its own columns.

    In float32 the size of an upload is known before the training, which then adds up the changes of the clients whose
    uploads will arrive and keeps none of them. Through a codec the changes are kept, sent and decoded one by one.
    """
    cohort, columns, train = call.cohort, call.columns, call.train
    chunk, task, samples = cohort.chunk, cohort.task, cohort.samples
    ranks = columns.sum(axis=1)
    weights = row_weights(aggregation, task, chunk, ranks)
    if call.coding.codec.stages:
        result = train(weights, True)
        began = time.perf_counter()
        assert result.row_changes is not None, "they were to be kept"
        finite = result.finite[cohort.positions]
        view = RowView(cohort, result.row_changes, columns, finite)
        uploads = send_each(chunk, task, call.coding, view)
        delivered = uploads.delivered[samples.order]
        counted = np.isfinite(view.received[:, :1]) if call.some_rows else None
        if counted is not None:
            view.received[~counted[:, 0]] = 0
        total, touched = sum_rows(
            *(task.data.n_items, samples.row_items, samples.row_starts),
            *(view.received, weights[samples.order], delivered),
        )
        if counted is not None:
            ones = np.ones(len(samples.order), dtype=np.float32)
            counts, _ = sum_rows(
                *(task.data.n_items, samples.row_items, samples.row_starts),
                *(counted.astype(np.float32), ones, delivered),
            )
            touched = counts[:, 0].astype(np.float64)
    else:
        bits = float_bits(cohort, ranks, aggregation, layout)
        sends = (ranks > 0) & chunk.affords(bits)
        arrives = sends & chunk.arrives()
        result = train(weights * arrives, False)
        began = time.perf_counter()
        finite = result.finite[cohort.positions]
        uploads = Uploads(bits * sends, finite & arrives, finite, {}, ranks)
        total, touched = result.total, result.touched
    weight = _divisor(aggregation, cohort, columns, uploads.delivered, touched)
    updates = _local_updates(cohort, result)
    done = chunk_result(chunk, updates, uploads, RowSum(total, weight).arrays()).encoded_since(began)
    whole = np.full(len(columns), result.user_factors.shape[1])
    return replace(done, touched_bits=int(float_bits(cohort, whole, aggregation, "touched").sum()))


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
    order, training = cohort.positions, cohort.task.training
    n_samples = cohort.samples.samples[order]
    return LocalUpdates(
        changes={},
        state={USER_FACTORS: result.user_factors[order]},
        loss=result.loss[order],
        examples=n_samples * training.epochs,
        steps=-(-n_samples // training.step_samples(n_samples)) * training.epochs,
    )
