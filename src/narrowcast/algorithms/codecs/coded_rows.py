"""Rows of a matrix on the wire with their values through a codec: which rows, which columns, and the coded values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.budget import encode_within
from narrowcast.algorithms.codecs.chain import NO_STATE, Codec
from narrowcast.algorithms.codecs.indices import read_indices, write_indices
from narrowcast.algorithms.codecs.wire import Reader, varint
from narrowcast.platform.types import Arrays, IntArray

ROWS = "rows"
"""The name under which a codec sees the values."""


@dataclass(frozen=True)
class CodedRows:
    """What one client sends: the number of columns, the rows as the shortest of three lists, the codec's bytes.

    The receiver knows the number of rows of the whole matrix, and which columns they are from the round's seeds.
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
    n_rows: int,
    key: int,
    *,
    state: Arrays = NO_STATE,
    budget_bits: float = np.inf,
) -> tuple[CodedRows, Arrays] | None:
    """Pack rows [m] ascending and their values [m, k] within a budget; None where that cannot be.

    Also returns the client's state once they are sent. Raises `UnsendableUpdateError` for values that are not finite.
    """
    head = varint(values.shape[1]) + varint(len(rows)) + write_indices(rows, n_rows, "smallest")
    left = budget_bits - 8 * len(head)
    if np.isinf(left):
        encoded, after = codec.encode_with_state({ROWS: values}, key, state)
    elif (within := encode_within(codec, {ROWS: values}, key, left, state)) is not None:
        encoded, after = within
    else:
        return None
    return CodedRows(head + encoded.to_bytes()), after


def decode_rows(
    codec: Codec, data: bytes, n_rows: int, most_columns: int, key: int
) -> tuple[IntArray, NDArray[np.float32]]:
    """The rows [m] and their values [m, k] as the receiver gets them, or `PayloadError`."""
    reader = Reader(data)
    columns = reader.varint(most_columns)
    sent = reader.varint(n_rows)
    rows = read_indices(reader, sent, n_rows, "smallest")
    shapes: Mapping[str, tuple[int, int]] = {ROWS: (sent, columns)}
    return rows, codec.decode(bytes(reader.rest()), shapes, key)[ROWS]
