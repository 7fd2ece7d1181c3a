"""Rows of a matrix on the wire with their values through a codec: which rows, which columns, and the coded values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.budget import encode_within
from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.indices import read_indices, write_indices
from narrowcast.algorithms.codecs.stage import NO_STATE
from narrowcast.algorithms.codecs.wire import Reader, varint
from narrowcast.platform.types import Arrays, BoolArray, IntArray

LIKELY, OTHER, BASIS = "likely", "other", "basis"
"""The names under which a codec sees the values: of rows that the receiver expects, of the others, and of a basis."""


@dataclass(frozen=True)
class CodedRows:
    """What one client sends: the number of columns, which rows, and the codec's bytes.

    The receiver knows the number of rows of the whole matrix, and from the round's seeds the columns and the rows that
    are likely. Rows are sent as the likely ones that are not there and the others that are, each as the shortest of
    three lists.
    """

    data: bytes

    def wire_bits(self) -> int:
        """Eight times the length of `to_bytes()`."""
        return 8 * len(self.data)

    def to_bytes(self) -> bytes:
        """The bytes that a radio would send."""
        return self.data


def encode_rows(
    codec: Codec,
    rows: IntArray,
    values: NDArray[np.float32],
    likely: BoolArray,
    key: int,
    *,
    state: Arrays = NO_STATE,
    budget_bits: float = np.inf,
    basis: NDArray[np.float32] | None = None,
    finest: int | None = None,
) -> tuple[CodedRows, Arrays] | None:
    """Pack rows [m] ascending and their values [m, k] within a budget; None where that cannot be.

    Shapes: likely [N]; basis [d, k], sent too where the values are coordinates in one of the client's own. There are
    `finest` levels at most. Also returns the client's state once they are sent; raises
    `UnsendableUpdateError` for values that are not finite.
    """
    sent = np.zeros(len(likely), dtype=bool)
    sent[rows] = True
    head = varint(values.shape[1]) + _places(~sent[likely]) + _places(sent[~likely])
    left = budget_bits - 8 * len(head)
    tensors = {LIKELY: values} if codec.of_whole else {LIKELY: values[likely[rows]], OTHER: values[~likely[rows]]}
    if basis is not None:
        tensors[BASIS] = basis
    if np.isinf(left):
        encoded, after = codec.encode_with_state(tensors, key, state)
    elif (within := encode_within(codec, tensors, key, left, state, finest)) is not None:
        encoded, after = within
    else:
        return None
    return CodedRows(head + encoded.to_bytes()), after


def decode_rows(
    codec: Codec,
    data: bytes,
    likely: BoolArray,
    most_columns: int,
    key: int,
    *,
    dimension: int | None = None,
) -> tuple[IntArray, NDArray[np.float32]]:
    """The rows [m] and their values [m, k] as the receiver gets them, or `PayloadError`.

    With a `dimension` d the values come with a basis and are decoded to [m, d].
    """
    reader = Reader(data)
    columns = reader.varint(most_columns)
    sent = likely.copy()
    sent[np.flatnonzero(likely)[_read_places(reader, int(likely.sum()))]] = False
    sent[np.flatnonzero(~likely)[_read_places(reader, int((~likely).sum()))]] = True
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


def _places(marked: BoolArray) -> bytes:
    places = np.flatnonzero(marked)
    return varint(len(places)) + write_indices(places, len(marked), "smallest")


def _read_places(reader: Reader, count: int) -> IntArray:
    return read_indices(reader, reader.varint(count), count, "smallest")
