"""Top-K: the values of largest magnitude over all tensors, and their indices.

Reference: Aji and Heafield, EMNLP 2017; a baseline of Nguyen et al., WWW 2024 (arXiv:2401.03748).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.flat_values import flatten, n_values, share_of, unflatten
from narrowcast.algorithms.codecs.indices import IndexLayout, max_index_bytes, read_indices, write_indices
from narrowcast.algorithms.codecs.stage import Shapes, Tensors, Transform
from narrowcast.algorithms.codecs.wire import Reader
from narrowcast.platform.types import Arrays, IntArray

VALUES = "values"


class TopK(Transform):
    """Keep ceil(fraction n) of all n values of an update, or `count` of them, and send their indices.

    Of values of one magnitude those of the lowest indices are kept.

    The rest of the chain gets `values` [k], in the order of their indices. The code released with CoLR is `indices:
    int32` (64 bits per kept value), without error feedback, on all rows of the item matrix, untouched ones included.

    Differs from the paper: `indices: smallest`, the default, sends a list, a bitmap or coded gaps, whichever is
    shortest.
    """

    kind: Literal["top_k"] = "top_k"
    fraction: float = Field(0.01, gt=0, le=1, description="share of the values to keep; at least one is kept")
    count: int | None = Field(None, ge=1, description="number of values to keep, in place of a fraction")
    indices: IndexLayout = "smallest"

    def kept(self, size: int) -> int:
        """Return the number of values kept of `n` values."""
        return share_of(self.fraction, size) if self.count is None else min(size, self.count)

    def inner_shapes(self, shapes: Shapes) -> Shapes:
        """Return the shape of the kept values."""
        return {VALUES: (self.kept(n_values(shapes)),)}

    def side_bytes(self, shapes: Shapes) -> int:
        """Return the most bytes of the indices."""
        size = n_values(shapes)
        return max_index_bytes(self.kept(size), size, self.indices)

    def write(self, tensors: Tensors, key: int, state: Arrays, rest: Codec) -> tuple[bytes, Arrays]:
        """Return the indices, then the values."""
        flat = flatten(tensors)
        places = _largest(flat, self.kept(len(flat)))
        data, after = rest.write({VALUES: flat[places]}, key, state)
        return write_indices(places, len(flat), self.indices) + data, after

    def read(self, reader: Reader, shapes: Shapes, key: int, rest: Codec) -> Tensors:
        """Return the kept values at their indices, zeros elsewhere."""
        size = n_values(shapes)
        places = read_indices(reader, self.kept(size), size, self.indices)
        flat = np.zeros(size, dtype=rest.dtype)
        flat[places] = rest.read(reader, self.inner_shapes(shapes), key)[VALUES]
        return unflatten(flat, shapes)


def _largest(flat: NDArray[Any], count: int) -> IntArray:
    """Return the indices of the `count` values of largest magnitude, ascending; zeros are considered only if needed."""
    places = np.flatnonzero(flat != 0)
    if len(places) <= count:
        zeros = np.flatnonzero(flat == 0)[: count - len(places)]
        return np.sort(np.concatenate([places, zeros]))
    if not count:
        return places[:0]
    sizes = np.abs(flat[places])
    smallest = np.partition(sizes, -count)[-count]
    kept = np.flatnonzero(sizes >= smallest)
    if len(kept) > count:
        ties = np.flatnonzero(sizes[kept] == smallest)
        kept = np.delete(kept, ties[count - len(kept) :])
    return places[kept]
