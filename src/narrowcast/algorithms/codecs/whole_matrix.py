"""A whole matrix on the wire through a codec, zeros included, with a bit for each row that was trained."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.budget import encode_within
from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.coded_rows import CodedRows
from narrowcast.algorithms.codecs.wire import Reader
from narrowcast.platform.types import IntArray, PayloadError

WHOLE = "matrix"
"""The name under which a codec sees the matrix."""


def encode_matrix(
    codec: Codec, rows: IntArray, values: NDArray[np.float32], n_rows: int, key: int, *, budget_bits: float = np.inf
) -> CodedRows | None:
    """Pack a matrix [n_rows, k] that has `values` [m, k] in the trained `rows` and zeros elsewhere, within a budget.

    None where no levels of the codec fit; raises `UnsendableUpdateError` for values that are not finite.
    """
    trained = np.zeros(n_rows, dtype=bool)
    trained[rows] = True
    matrix = np.zeros((n_rows, values.shape[1]), dtype=np.float32)
    matrix[rows] = values
    mask = np.packbits(trained, bitorder="little").tobytes()
    if np.isinf(budget_bits):
        return CodedRows(mask + codec.encode({WHOLE: matrix}, key).to_bytes())
    fitting = encode_within(codec, {WHOLE: matrix}, key, budget_bits - 8 * len(mask))
    return None if fitting is None else CodedRows(mask + fitting[0].to_bytes())


def decode_matrix(
    codec: Codec, data: bytes, n_rows: int, columns: int, key: int
) -> tuple[IntArray, NDArray[np.float32]]:
    """The trained rows [m] and what the receiver gets of them [m, k], or `PayloadError`."""
    reader = Reader(data)
    bits = np.unpackbits(np.frombuffer(bytes(reader.take(-(-n_rows // 8))), dtype=np.uint8), bitorder="little")
    if bits[n_rows:].any():
        raise PayloadError("the row mask has bits beyond the last row")
    rows = np.flatnonzero(bits[:n_rows])
    matrix = codec.decode(bytes(reader.rest()), {WHOLE: (n_rows, columns)}, key)[WHOLE]
    return rows, matrix[rows]
