"""Rows of a matrix on the wire with their values through a codec: header, row indices, coded values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.budget import ClientEncoder
from narrowcast.algorithms.codecs.chain import Codec, EncodedUpdate
from narrowcast.algorithms.codecs.indices import read_indices, write_indices
from narrowcast.algorithms.codecs.message_header import MessageHeader, MessageKind
from narrowcast.algorithms.codecs.wire import Reader, varint
from narrowcast.platform.types import Arrays, BoolArray, IntArray, PayloadError

LIKELY, OTHER, BASIS = "likely", "other", "basis"
"""The tensors that a codec sees: values of rows that the receiver expects, values of other rows, and a basis.

If the receiver expects none, or a stage needs all rows at once, `LIKELY` has the values of all rows.
"""

LikelyRows = Callable[[int], BoolArray]
"""The rows [N] that the receiver expects of a client with so many positives, from public streams alone."""


@dataclass(frozen=True)
class RowUpdate:
    """The rows that one client changed, of a matrix of `n_rows`.

    `positives` are the client's examples. `likely`, if the receiver expects rows, gives those of so many positives.

    Shapes: rows [m] ascending; values [m, k].
    """

    rows: IntArray
    values: NDArray[np.float32]
    n_rows: int
    positives: int = 0
    likely: LikelyRows | None = None

    @property
    def unexpected(self) -> IntArray:
        """The rows that the receiver does not expect."""
        return self.rows if self.likely is None else self.rows[~self.likely(self.positives)[self.rows]]


def encode_rows(
    encoder: ClientEncoder,
    update: RowUpdate,
    *,
    basis: NDArray[np.float32] | None = None,
    finest: int | None = None,
) -> tuple[EncodedUpdate, Arrays] | None:
    """Pack an update within the client's budget; None if no levels, up to `finest`, fit.

    Sent are the header, the rows as the shortest of three index lists, and the codec's bytes. Of likely rows those that
    are absent are listed instead; the receiver regenerates them from the number of positives, which the header has.
    `basis` [d, k] is sent too if the values are coordinates in a basis that the receiver does not know. Also return the
    client's codec state once the update is sent. Raise `UnsendableUpdateError` for values that are not finite.
    """
    rows, values = update.rows, update.values
    sent = np.zeros(update.n_rows, dtype=bool)
    sent[rows] = True
    header = MessageHeader(MessageKind.CODED_ROWS, columns=values.shape[1], examples=update.positives)
    head, tensors = header.to_bytes(), {LIKELY: values}
    if update.likely is None:
        head += _index_list(sent)
    else:
        likely = update.likely(update.positives)
        head += _index_list(~sent[likely]) + _index_list(sent[~likely])
        if not encoder.codec.of_whole:
            tensors = {LIKELY: values[likely[rows]], OTHER: values[~likely[rows]]}
    if basis is not None:
        tensors[BASIS] = basis
    fitting = encoder.encode(tensors, head, finest)
    return None if fitting is None else (EncodedUpdate(fitting[0]), fitting[1])


def decode_rows(
    codec: Codec,
    data: bytes,
    n_rows: int,
    max_columns: int,
    key: int,
    *,
    likely: LikelyRows | None = None,
    dimension: int | None = None,
) -> tuple[IntArray, NDArray[np.float32]]:
    """Return the rows [m] of `n_rows` and their values [m, k] as the receiver gets them.

    Everything that it needs besides the bytes is public. With a `dimension` d the values come with a basis [d, k], and
    are returned as [m, d]. Raise `PayloadError` for bytes that `encode_rows` cannot have written.
    """
    reader = Reader(data)
    header = MessageHeader.read(reader, MessageKind.CODED_ROWS)
    columns = header.columns
    if columns > max_columns:
        raise PayloadError(f"the payload has {columns} columns where at most {max_columns} are allowed")
    if likely is not None and header.examples > n_rows:
        raise PayloadError(f"the payload is of {header.examples} positives among {n_rows} rows")
    expected = np.zeros(n_rows, dtype=bool) if likely is None else likely(header.examples)
    sent = expected.copy()
    if likely is not None:
        sent[np.flatnonzero(expected)[_read_index_list(reader, int(expected.sum()))]] = False
    sent[np.flatnonzero(~expected)[_read_index_list(reader, int((~expected).sum()))]] = True
    rows, whole = np.flatnonzero(sent), likely is None or codec.of_whole
    first = np.ones(len(rows), dtype=bool) if whole else expected[rows]
    shapes = {LIKELY: (int(first.sum()), columns)}
    if not whole:
        shapes[OTHER] = (int((~first).sum()), columns)
    if dimension is not None:
        shapes[BASIS] = (dimension, columns)
    tensors = codec.decode(bytes(reader.rest()), shapes, key)
    values = tensors[LIKELY]
    if not whole:
        values = np.empty((len(rows), columns), dtype=np.float32)
        values[first], values[~first] = tensors[LIKELY], tensors[OTHER]
    return rows, values if dimension is None else values @ tensors[BASIS].T


def _index_list(marked: BoolArray) -> bytes:
    indices = np.flatnonzero(marked)
    return varint(len(indices)) + write_indices(indices, len(marked), "smallest")


def _read_index_list(reader: Reader, count: int) -> IntArray:
    return read_indices(reader, reader.varint(count), count, "smallest")
