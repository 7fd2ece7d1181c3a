"""A whole matrix on the wire through a codec, untouched rows included, with a bit per row: trained or not."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.budget import ClientEncoder
from narrowcast.algorithms.codecs.chain import Codec, EncodedUpdate
from narrowcast.algorithms.codecs.message_header import MessageHeader, MessageKind
from narrowcast.algorithms.codecs.wire import Reader
from narrowcast.platform.types import IntArray, PayloadError

WHOLE = "matrix"
"""The tensor that a codec sees."""


def encode_matrix(
    encoder: ClientEncoder, rows: IntArray, values: NDArray[np.float32], n_rows: int, examples: int = 0
) -> EncodedUpdate | None:
    """Pack a matrix [n_rows, k] with `values` [m, k] in the trained `rows` and zeros elsewhere, within the budget.

    None if no levels of the codec fit. Raise `UnsendableUpdateError` for values that are not finite.
    """
    trained = np.zeros(n_rows, dtype=bool)
    trained[rows] = True
    matrix = np.zeros((n_rows, values.shape[1]), dtype=np.float32)
    matrix[rows] = values
    header = MessageHeader(MessageKind.CODED_MATRIX, columns=values.shape[1], examples=examples)
    fitting = encoder.encode({WHOLE: matrix}, header.to_bytes() + np.packbits(trained, bitorder="little").tobytes())
    return None if fitting is None else EncodedUpdate(fitting[0])


def decode_matrix(
    codec: Codec, data: bytes, n_rows: int, columns: int, key: int
) -> tuple[IntArray, NDArray[np.float32]]:
    """Return the trained rows [m] and their values [m, k] as the receiver gets them; raise `PayloadError`."""
    reader = Reader(data)
    if MessageHeader.read(reader, MessageKind.CODED_MATRIX).columns != columns:
        raise PayloadError(f"the payload is of another matrix than one of {columns} columns")
    bits = np.unpackbits(np.frombuffer(bytes(reader.take(-(-n_rows // 8))), dtype=np.uint8), bitorder="little")
    if bits[n_rows:].any():
        raise PayloadError("the row mask has bits beyond the last row")
    rows = np.flatnonzero(bits[:n_rows])
    matrix = codec.decode(bytes(reader.rest()), {WHOLE: (n_rows, columns)}, key)[WHOLE]
    return rows, matrix[rows]
