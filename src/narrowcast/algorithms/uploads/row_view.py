"""The rows of a matrix that a chunk's clients changed, client by client, and how they are put on the wire."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.client_encoder import ClientEncoder
from narrowcast.algorithms.codecs.coded_rows import RowUpdate, decode_rows, encode_rows
from narrowcast.algorithms.codecs.error_feedback import memory_of_rows, with_memory_of_rows
from narrowcast.algorithms.codecs.rows import RowLayout
from narrowcast.algorithms.codecs.whole_matrix import decode_matrix, encode_matrix
from narrowcast.algorithms.local_training.batches import likely_rows
from narrowcast.algorithms.local_training.cohort import RowCohort
from narrowcast.algorithms.uploads.client_loop import Coding, Sent
from narrowcast.platform.types import BoolArray, IntArray

Rows = NDArray[np.float32]
RowCoding = Coding[RowUpdate, Rows]


@dataclass(frozen=True)
class RowView:
    """Each client's rows of the changes, in the columns that it sends.

    Shapes: changes [R, k], and `received` likewise; columns [C, k]; finite [C]. With `expects_negatives` the receiver
    regenerates most of the negative items that a client drew, and expects their rows.
    """

    cohort: RowCohort
    changes: Rows
    columns: BoolArray
    finite: BoolArray
    expects_negatives: bool = True
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

    def take(self, place: int) -> RowUpdate:
        """Return one client's rows in its own columns."""
        own, columns = self.cohort.rows(place), np.flatnonzero(self.columns[place])
        return RowUpdate(self.cohort.samples.row_items[own], self.changes[own][:, columns], self._likely(place))

    def put(self, place: int, received: Rows) -> None:
        """Store the rows that the server decoded of one client."""
        own = self.cohort.rows(place)
        self.received[own.start : own.stop, np.flatnonzero(self.columns[place])] = received

    def _likely(self, place: int) -> BoolArray:
        chunk, task = self.cohort.chunk, self.cohort.task
        if not self.expects_negatives:
            return np.zeros(task.data.n_items, dtype=bool)
        drawn = int(self.cohort.samples.positives[self.cohort.places[place]]) * task.training.negatives
        return likely_rows(task.data.n_items, drawn, task.seed, chunk.round_index, int(chunk.clients[place]))


def row_coding(codec: Codec, layout: RowLayout, first_levels: IntArray | None = None) -> RowCoding:
    """Return how rows are coded: the touched ones alone, or the whole matrix."""
    return Coding(codec, send_touched_rows if layout == "touched" else send_whole_matrix, first_levels)


def send_touched_rows(update: RowUpdate, encoder: ClientEncoder) -> Sent[Rows] | None:
    """Send the touched rows; the codec's memory of the other rows stays as it is."""
    before = memory_of_rows(encoder.state, update.rows)
    fitting = encode_rows(replace(encoder, state=before), update)
    if fitting is None:
        return None
    payload, after = fitting
    _, received = decode_rows(encoder.codec, payload.to_bytes(), update.likely, update.values.shape[1], encoder.key)
    return Sent(payload.wire_bits(), received, with_memory_of_rows(encoder.state, update.rows, after))


def send_whole_matrix(update: RowUpdate, encoder: ClientEncoder) -> Sent[Rows] | None:
    """Send the whole matrix; the decoded values of untouched rows are dropped, and the client keeps no codec state."""
    n_rows, columns = len(update.likely), update.values.shape[1]
    payload = encode_matrix(encoder, update.rows, update.values, n_rows)
    if payload is None:
        return None
    _, received = decode_matrix(encoder.codec, payload.to_bytes(), n_rows, columns, encoder.key)
    return Sent(payload.wire_bits(), received, {})
