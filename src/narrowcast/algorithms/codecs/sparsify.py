"""Sparsification: Top-K, a threshold, random indices, error feedback, and the rows that are not zero."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.codecs.chain import (
    Codec,
    Shapes,
    Tensors,
    Transform,
    ValueStage,
    check_values,
    flatten,
    n_values,
    share_of,
    stream,
    unflatten,
)
from narrowcast.algorithms.codecs.wire import (
    IndexLayout,
    Reader,
    max_index_bytes,
    read_indices,
    varint,
    varint_bytes,
    write_indices,
)
from narrowcast.platform.compiled import compiled, read_only
from narrowcast.platform.seeds import uniform_bits
from narrowcast.platform.types import Arrays, BoolArray, IntArray

VALUES = "values"


class TopK(Transform):
    """Keep ceil(fraction n) of all n values of an update, or `count` of them, and send their indices.

    The values of largest magnitude over all tensors are kept; of values of one magnitude those of the lowest indices.

    The rest of the chain gets `values` [k], in the order of their indices. The code released with CoLR is `indices:
    int32` (64 bits per kept value), without error feedback, on all rows of the item matrix, untouched ones included.

    Differs from the paper: `indices: smallest`, the default, sends a list, a bitmap or coded gaps, whichever is
    shortest.

    Reference: Aji and Heafield, EMNLP 2017; a baseline of Nguyen et al., WWW 2024 (arXiv:2401.03748).
    """

    kind: Literal["top_k"] = "top_k"
    fraction: float = Field(0.01, gt=0, le=1, description="share of the values to keep; at least one is kept")
    count: int | None = Field(None, ge=1, description="number of values to keep, in place of a fraction")
    indices: IndexLayout = "smallest"

    def n_kept(self, size: int) -> int:
        """Return how many of `size` values are kept."""
        return share_of(self.fraction, size) if self.count is None else min(size, self.count)

    def inner_shapes(self, shapes: Shapes) -> Shapes:
        """Return the shape of the kept values."""
        return {VALUES: (self.n_kept(n_values(shapes)),)}

    def side_bytes(self, shapes: Shapes) -> int:
        """Return the most bytes of the indices."""
        size = n_values(shapes)
        return max_index_bytes(self.n_kept(size), size, self.indices)

    def write(self, tensors: Tensors, key: int, state: Arrays, rest: Codec) -> tuple[bytes, Arrays]:
        """Return the indices, then the values."""
        flat = flatten(tensors)
        indices = _largest(flat, self.n_kept(len(flat)))
        data, after = rest.write({VALUES: flat[indices]}, key, state)
        return write_indices(indices, len(flat), self.indices) + data, after

    def read(self, reader: Reader, shapes: Shapes, key: int, rest: Codec) -> Tensors:
        """Return the kept values at their indices, zeros elsewhere."""
        size = n_values(shapes)
        indices = read_indices(reader, self.n_kept(size), size, self.indices)
        flat = np.zeros(size, dtype=rest.dtype)
        flat[indices] = rest.read(reader, self.inner_shapes(shapes), key)[VALUES]
        return unflatten(flat, shapes)


def _largest(flat: NDArray[Any], count: int) -> IntArray:
    """Return the indices of the `count` values of largest magnitude, ascending; zeros are considered only if needed."""
    nonzero = np.flatnonzero(flat != 0)
    if len(nonzero) <= count:
        zeros = np.flatnonzero(flat == 0)[: count - len(nonzero)]
        return np.sort(np.concatenate([nonzero, zeros]))
    if not count:
        return nonzero[:0]
    sizes = np.abs(flat[nonzero])
    smallest = np.partition(sizes, -count)[-count]
    candidates = np.flatnonzero(sizes >= smallest)
    if len(candidates) > count:
        ties = np.flatnonzero(sizes[candidates] == smallest)
        candidates = np.delete(candidates, ties[count - len(candidates) :])
    return nonzero[candidates]


class Threshold(ValueStage):
    """Keep the values whose magnitude is above `magnitude`, and send how many they are and their indices.

    The rest of the chain gets `values` [k], in the order of their indices. With 0 all values are kept but zeros, and
    the update arrives as it is.

    Reference: Strom, Scalable distributed DNN training using commodity GPU cloud computing, Interspeech 2015, without
    its quantisation; the uploads of FedMatch (Jeong et al., ICLR 2021, arXiv:2006.12097), whose released code takes
    5e-5, or 1e-5 with labels at the server.
    """

    kind: Literal["threshold"] = "threshold"
    magnitude: float = Field(0.0, ge=0, allow_inf_nan=False, description="magnitude above which a value is sent")
    indices: IndexLayout = "smallest"

    def write(self, tensors: Tensors, key: int, state: Arrays, rest: Codec) -> tuple[bytes, Arrays]:
        """Return the number of values, their indices, and the values."""
        flat = flatten(tensors)
        indices = np.flatnonzero(np.abs(flat) > self.magnitude)
        data, after = rest.write({VALUES: flat[indices]}, key, state)
        return varint(len(indices)) + write_indices(indices, len(flat), self.indices) + data, after

    def read(self, reader: Reader, shapes: Shapes, key: int, rest: Codec) -> Tensors:
        """Return the kept values at their indices, zeros elsewhere."""
        size = n_values(shapes)
        kept = reader.varint(size)
        indices = read_indices(reader, kept, size, self.indices)
        flat = np.zeros(size, dtype=rest.dtype)
        flat[indices] = rest.read(reader, {VALUES: (kept,)}, key)[VALUES]
        return unflatten(flat, shapes)

    def max_bytes(self, shapes: Shapes, rest: Codec) -> int:
        """Return the size of all values and their indices."""
        size = n_values(shapes)
        side = int(varint_bytes(size)) + max_index_bytes(size, size, self.indices)
        return side + rest.max_bytes({VALUES: (size,)})

    def init_state(self, shapes: Shapes, rest: Codec) -> Arrays:
        """Return the state of the rest of the chain."""
        return rest.init_state({VALUES: (n_values(shapes),)})


DRAWN = "drawn"


class RandomK(Transform):
    """Keep ceil(fraction n) of all n values of an update, at indices drawn from the key, each set equally likely.

    Both sides draw the indices, so that none is sent. The rest of the chain gets `drawn` [k], in the order of their
    indices. `scale: unbiased` multiplies them by n / k, whose mean is the update and whose relative squared error is
    n / k - 1, for any update; after it a quantiser of relative squared error v, unbiased, has (1 + v) n / k - 1. `kept`
    leaves them as they are, relative squared error 1 - k / n, for sums of few clients or with error feedback.

    Differs from the papers: exactly ceil(fraction n) values instead of a coin for each, so that the size of an update
    is known and its error is less.

    Reference: Konecny et al., arXiv:1610.05492, section 3 (subsampling); Wangni et al., NeurIPS 2018
    (arXiv:1710.09854); Stich et al., NeurIPS 2018 (arXiv:1809.07599), rand-k. With `eden` after it: Vargaftik et al.,
    EDEN, ICML 2022 (arXiv:2108.08842), below one bit per value.
    """

    kind: Literal["random_k"] = "random_k"
    fraction: float = Field(0.1, gt=0, le=1, description="share of the values to keep; at least one is kept")
    scale: Literal["unbiased", "kept"] = Field(
        "unbiased", description="multiply the kept values by n / k, or leave them as they are"
    )

    def inner_shapes(self, shapes: Shapes) -> Shapes:
        """Return the shape of the kept values."""
        return {DRAWN: (share_of(self.fraction, n_values(shapes)),)}

    def write(self, tensors: Tensors, key: int, state: Arrays, rest: Codec) -> tuple[bytes, Arrays]:
        """Return the bytes of the rest of the chain; the indices add none."""
        values = flatten(tensors)
        size = share_of(self.fraction, len(values))
        return rest.write({DRAWN: values[_random_indices(len(values), size, key)]}, key, state)

    def read(self, reader: Reader, shapes: Shapes, key: int, rest: Codec) -> Tensors:
        """Return the kept values, scaled, at their indices, and zeros elsewhere."""
        drawn = rest.read(reader, self.inner_shapes(shapes), key)[DRAWN]
        values = np.zeros(n_values(shapes), dtype=rest.dtype)
        scale = len(values) / len(drawn) if self.scale == "unbiased" and len(drawn) else 1.0
        values[_random_indices(len(values), len(drawn), key)] = drawn * rest.dtype.type(scale)
        return unflatten(values, shapes)


def _random_indices(count: int, size: int, key: int) -> IntArray:
    """Return `size` of 0..count-1, ascending: those with the least words of the stream, all distinct."""
    if size == count:
        return np.arange(count)
    words = uniform_bits(stream(key, "places"), np.arange(count))
    return np.sort(np.argpartition(words, size)[:size])


MEMORY = "memory/"
"""Prefix of names in a client's state: the error memory of every tensor, in that tensor's shape, zero at first."""


class ErrorFeedback(ValueStage):
    """Send x + e for an update x and store e = (x + e) - decoded(x + e), the error of the rest of the chain.

    If an update is some rows of a matrix, a client's memory covers all rows: `memory_of_rows` selects those of the
    round and `with_memory_of_rows` writes them back; the others wait until they are touched again. Sent updates count
    as received, since a client does not learn that an upload was lost.

    Reference: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019 (arXiv:1901.09847).
    """

    of_whole: ClassVar[bool] = True
    kind: Literal["error_feedback"] = "error_feedback"

    @property
    def remembers(self) -> bool:
        """True: the error of former updates."""
        return True

    def write(self, tensors: Tensors, key: int, state: Arrays, rest: Codec) -> tuple[bytes, Arrays]:
        """Return the bytes of the update plus its memory."""
        owed = {name: values + state.get(MEMORY + name, np.float32(0)) for name, values in tensors.items()}
        check_values(owed)
        data, after = rest.write(owed, key, state)
        received = rest.read(Reader(data), {name: values.shape for name, values in owed.items()}, key)
        memory = {MEMORY + name: values - received[name] for name, values in owed.items()}
        return data, {**after, **memory}

    def read(self, reader: Reader, shapes: Shapes, key: int, rest: Codec) -> Tensors:
        """Return the tensors that the rest of the chain decodes."""
        return rest.read(reader, shapes, key)

    def max_bytes(self, shapes: Shapes, rest: Codec) -> int:
        """Return the most bytes of the rest."""
        return rest.max_bytes(shapes)

    def init_state(self, shapes: Shapes, rest: Codec) -> Arrays:
        """Return zero memory for every tensor."""
        memory = {MEMORY + name: np.zeros(shape, dtype=rest.dtype) for name, shape in shapes.items()}
        return {**rest.init_state(shapes), **memory}


def memory_of_rows(state: Arrays, rows: IntArray) -> Arrays:
    """Return a client's state with the memory of these rows only, [m, ...] for each [N, ...]."""
    return {name: values[rows] if name.startswith(MEMORY) else values for name, values in state.items()}


def with_memory_of_rows(state: Arrays, rows: IntArray, part: Arrays) -> Arrays:
    """Return the whole state with `part` in the rows of the memory and in place of everything else.

    The memory is copied.
    """
    whole = {**state, **part}
    for name in part:
        if name.startswith(MEMORY):
            whole[name] = np.array(state[name])
            whole[name][rows] = part[name]
    return whole


def nonzero_rows(matrix: NDArray[np.floating]) -> BoolArray:
    """Return whether each row of a matrix [m, d] has an entry that is not zero, [m]; NaN is not zero.

    A client's change of the item matrix has few such rows.
    """
    nonzero = np.empty(len(matrix), dtype=np.bool_)
    _mark(read_only(matrix, matrix.dtype), nonzero)
    return nonzero


@compiled()
def _mark(matrix: NDArray[np.floating], nonzero: BoolArray) -> None:
    for row in range(len(matrix)):
        column = 0
        while column < matrix.shape[1] and matrix[row, column] == 0:
            column += 1
        nonzero[row] = column < matrix.shape[1]
