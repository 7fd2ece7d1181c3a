"""Rows of a matrix on the wire with their values through a codec: number of columns, row indices, coded values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.budget import ClientEncoder
from narrowcast.algorithms.codecs.chain import Codec, EncodedUpdate
from narrowcast.algorithms.codecs.indices import read_indices, write_indices
from narrowcast.algorithms.codecs.wire import Reader, varint
from narrowcast.platform.types import Arrays, BoolArray, IntArray

LIKELY, OTHER, BASIS = "likely", "other", "basis"
"""The tensors that a codec sees: values of rows that the receiver expects, values of other rows, and a basis."""


@dataclass(frozen=True)
class RowUpdate:
    """The rows that one client changed.

    Shapes: rows [m] ascending; values [m, k]; likely [N], the rows that the receiver expects, which it regenerates
    from the round's seeds.
    """

    rows: IntArray
    values: NDArray[np.float32]
    likely: BoolArray


def encode_rows(
    encoder: ClientEncoder,
    update: RowUpdate,
    *,
    basis: NDArray[np.float32] | None = None,
    finest: int | None = None,
) -> tuple[EncodedUpdate, Arrays] | None:
    """Pack an update within the client's budget; None if no levels, up to `finest`, fit.

    Sent are the number of columns, the likely rows that are absent and the other rows that are present, each as the
    shortest of three index lists, and the codec's bytes. `basis` [d, k] is sent too if the values are coordinates in a
    basis that the receiver does not know. Also return the client's codec state once the update is sent. Raise
    `UnsendableUpdateError` for values that are not finite.
    """
    rows, values, likely = update.rows, update.values, update.likely
    sent = np.zeros(len(likely), dtype=bool)
    sent[rows] = True
    head = varint(values.shape[1]) + _index_list(~sent[likely]) + _index_list(sent[~likely])
    whole = encoder.codec.of_whole
    tensors = {LIKELY: values} if whole else {LIKELY: values[likely[rows]], OTHER: values[~likely[rows]]}
    if basis is not None:
        tensors[BASIS] = basis
    fitting = encoder.encode(tensors, head, finest)
    return None if fitting is None else (EncodedUpdate(fitting[0]), fitting[1])


def decode_rows(
    codec: Codec,
    data: bytes,
    likely: BoolArray,
    max_columns: int,
    key: int,
    *,
    dimension: int | None = None,
) -> tuple[IntArray, NDArray[np.float32]]:
    """Return the rows [m] and their values [m, k] as the receiver gets them.

    With a `dimension` d the values come with a basis [d, k], and are returned as [m, d]. Raise `PayloadError` for
    bytes that `encode_rows` cannot have written.
    """
    reader = Reader(data)
    columns = reader.varint(max_columns)
    sent = likely.copy()
    sent[np.flatnonzero(likely)[_read_index_list(reader, int(likely.sum()))]] = False
    sent[np.flatnonzero(~likely)[_read_index_list(reader, int((~likely).sum()))]] = True
    rows = np.flatnonzero(sent)
    expected = np.ones(len(rows), dtype=bool) if codec.of_whole else likely[rows]
    shapes = {LIKELY: (int(expected.sum()), columns)}
    if not codec.of_whole:
        shapes[OTHER] = (int((~expected).sum()), columns)
    if dimension is not None:
        shapes[BASIS] = (dimension, columns)
    tensors = codec.decode(bytes(reader.rest()), shapes, key)
    values = np.empty((len(rows), columns), dtype=np.float32)
    values[expected] = tensors[LIKELY]
    if not codec.of_whole:
        values[~expected] = tensors[OTHER]
    return rows, values if dimension is None else values @ tensors[BASIS].T


def _index_list(marked: BoolArray) -> bytes:
    indices = np.flatnonzero(marked)
    return varint(len(indices)) + write_indices(indices, len(marked), "smallest")


def _read_index_list(reader: Reader, count: int) -> IntArray:
    return read_indices(reader, reader.varint(count), count, "smallest")
