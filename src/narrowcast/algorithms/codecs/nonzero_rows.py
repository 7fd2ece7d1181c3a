"""The rows of a matrix that are not all zeros, of which a client's change of the item matrix has few."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.local_training.compiled import compiled, read_only
from narrowcast.platform.types import BoolArray


def nonzero_rows(matrix: NDArray[np.floating]) -> BoolArray:
    """Return whether each row of a matrix [m, d] has an entry that is not zero, [m]; NaN is not zero."""
    found = np.empty(len(matrix), dtype=np.bool_)
    _mark(read_only(matrix, matrix.dtype), found)
    return found


@compiled()
def _mark(matrix: NDArray[np.floating], found: BoolArray) -> None:
    for row in range(len(matrix)):
        column = 0
        while column < matrix.shape[1] and matrix[row, column] == 0:
            column += 1
        found[row] = column < matrix.shape[1]
