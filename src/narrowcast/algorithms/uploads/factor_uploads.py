"""Uploads of the rows of W that clients changed: as a whole matrix, or the rows of their entries alone."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.budget import ClientEncoder
from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.coded_rows import LIKELY, RowUpdate
from narrowcast.algorithms.codecs.coded_tensors import TensorUpdate
from narrowcast.algorithms.codecs.dense import dense_wire_bits
from narrowcast.algorithms.codecs.message_header import dtype_of
from narrowcast.algorithms.codecs.rows import RowLayout, rows_wire_bits
from narrowcast.algorithms.local_training.factor_task import local_updates
from narrowcast.algorithms.local_training.factor_updates import Factors, FactorUpdates
from narrowcast.algorithms.local_training.row_sum import sum_rows
from narrowcast.algorithms.uploads.client_loop import Coding, Sent, Uploads, chunk_result, init_codec_state, send_each
from narrowcast.algorithms.uploads.partial_sums import TensorSum
from narrowcast.algorithms.uploads.row_uploads import send_touched_rows
from narrowcast.algorithms.uploads.tensor_uploads import send_coded_tensors
from narrowcast.platform.contracts import Task
from narrowcast.platform.models.masked_factorisation import ROW_FACTORS
from narrowcast.platform.types import Arrays, BoolArray, Chunk, ChunkResult, FloatArray, IntArray


@dataclass(frozen=True)
class FactorUploads:
    """The upload of clients' changes of W: its layout and its codec."""

    codec: Codec
    layout: RowLayout

    def init_state(self, n_clients: int, row_factors: Factors) -> Arrays:
        """Return the codec's state on every client before round 1, [U, ...]."""
        name = ROW_FACTORS if self.layout == "all" else LIKELY
        return init_codec_state(self.codec.stages, n_clients, {name: row_factors})

    def plain_bits(self, row_factors: Factors, n_rows: IntArray) -> IntArray:
        """Return the size of uploads without a codec, of clients with so many rows, [C]."""
        if self.layout == "all":
            return np.full(len(n_rows), dense_wire_bits(row_factors.size, row_factors.dtype))
        n_items, rank = row_factors.shape
        return rows_wire_bits(n_rows=n_items, sent_rows=n_rows, rank=rank, layout="touched", mask=True)

    def send(
        self, chunk: Chunk, task: Task, row_factors: Factors, updates: FactorUpdates, weights: FloatArray
    ) -> ChunkResult:
        """Send the changes of clients with a weight [C], and add them up by their weights.

        A client of weight 0 sends nothing, and keeps what it learnt of its own columns.
        """
        began = time.perf_counter()
        sends = (weights > 0) & (task.data.examples[chunk.clients] > 0)
        if self.codec.stages:
            wire: Any = self._send_matrix if self.layout == "all" else send_touched_rows
            view = _View(self.layout, chunk, task, row_factors, updates, weights, sends)
            codec = self.codec.of(dtype_of({ROW_FACTORS: row_factors}))
            uploads, total = send_each(chunk, task, Coding(codec, wire), view), view.total
        else:
            bits = self.plain_bits(row_factors, np.diff(updates.row_starts))
            sends = sends & chunk.affords(bits)
            delivered = sends & updates.finite & chunk.arrives()
            uploads = Uploads(np.where(sends, bits, 0), delivered, updates.finite, {})
            total, _ = sum_rows(
                *(len(row_factors), updates.rows, updates.row_starts, updates.changes, weights, delivered),
                dtype=row_factors.dtype,
            )
        weight = np.array(weights[uploads.delivered].sum(), dtype=np.float64)
        partial = TensorSum({ROW_FACTORS: total}, weight).arrays()
        return chunk_result(chunk, local_updates(updates, {}), uploads, partial).encoded_since(began)

    @staticmethod
    def _send_matrix(update: TensorUpdate, encoder: ClientEncoder) -> Sent[Factors] | None:
        sent = send_coded_tensors(update, encoder)
        return None if sent is None else Sent(sent.bits, np.asarray(sent.received[ROW_FACTORS]), sent.state)


@dataclass(frozen=True)
class _View:
    """The changes of W client by client; what the server decodes is added to `total` [N, K] by the clients' weights."""

    layout: RowLayout
    chunk: Chunk
    task: Task
    row_factors: Factors
    updates: FactorUpdates
    weights: FloatArray
    sends: BoolArray
    total: NDArray[Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", np.zeros_like(self.row_factors))

    @property
    def finite(self) -> BoolArray:
        """The clients whose training stayed finite, [C]."""
        return self.updates.finite

    @property
    def ranks(self) -> None:
        """None: these updates have no rank."""

    def take(self, place: int) -> TensorUpdate | RowUpdate:
        """Return one client's whole matrix of changes, or its rows."""
        rows, changes = self.updates.of_client(place)
        examples = int(self.task.data.examples[self.chunk.clients[place]])
        if self.layout == "touched":
            return RowUpdate(rows, changes, len(self.row_factors), examples)
        matrix = np.zeros_like(self.row_factors)
        matrix[rows] = changes
        return TensorUpdate({ROW_FACTORS: matrix}, examples, 0)

    def put(self, place: int, received: Factors) -> None:
        """Add what the server decoded of one client, unless its upload is lost."""
        if self.chunk.lost is not None and self.chunk.lost[place]:
            return
        if self.layout == "touched":
            self.total[self.updates.of_client(place)[0]] += self.weights[place] * received
        else:
            self.total[...] += self.weights[place] * received
