"""Randomised Hadamard rotation: random signs, then the Walsh-Hadamard transform, so that values have similar magnitude.

Reference: Ailon and Chazelle, STOC 2006; for distributed means, Suresh et al., ICML 2017 (arXiv:1611.00429).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.flat_values import flatten, n_values, unflatten
from narrowcast.algorithms.codecs.stage import Shapes, Tensors, Transform, stream
from narrowcast.algorithms.codecs.wire import Reader
from narrowcast.algorithms.local_training.compiled import compiled
from narrowcast.platform.seeds import Words, uniform_bits
from narrowcast.platform.types import Arrays

BLOCKS, TAIL = "blocks", "tail"
DEFAULT_BLOCK = 1024


def _power_of_two(block: int) -> int:
    if block & (block - 1):
        raise ValueError(f"should be a power of two, such as {1 << block.bit_length()}")
    return block


Block = Annotated[
    int,
    Field(ge=1, le=2**20, description="number of values rotated together, a power of two"),
    AfterValidator(_power_of_two),
]
Passes = Annotated[int, Field(ge=1, le=4, description="passes of random signs and Walsh-Hadamard transform")]


class Rotate(Transform):
    """Concatenate all tensors, cut them into blocks and rotate each block by an orthogonal map with signs from the key.

    The rest of the chain gets `blocks` [b, block] and `tail` [1, t]. The tail holds the remaining values, padded with
    zeros to the next power of two; the padding is sent and counted.

    Differs from the papers: 1. blocks of `block` values instead of one block of all values: less padding and, if the
    next stage has a norm per row, a norm per block. 2. two passes of signs and transform: after one, a block with few
    large values is far from uniformly rotated, see `eden`.
    """

    kind: Literal["rotate"] = "rotate"
    block: Block = DEFAULT_BLOCK
    passes: Passes = 2

    def inner_shapes(self, shapes: Shapes) -> Shapes:
        """Return the shapes of the blocks and the tail."""
        return rotated_shapes(n_values(shapes), self.block)

    def write(self, tensors: Tensors, key: int, state: Arrays, rest: Codec) -> tuple[bytes, Arrays]:
        """Return the bytes of the rest of the chain; the rotation adds none."""
        return rest.write(rotate(tensors, self.block, self.passes, key), key, state)

    def read(self, reader: Reader, shapes: Shapes, key: int, rest: Codec) -> Tensors:
        """Return the tensors, rotated back."""
        return rotate_back(rest.read(reader, self.inner_shapes(shapes), key), shapes, self.passes, key)


def rotated_shapes(count: int, block: int) -> Shapes:
    """Return the shapes that `rotate` gives for `count` values in total."""
    blocks, left = divmod(count, block)
    shapes: dict[str, tuple[int, ...]] = {}
    if blocks:
        shapes[BLOCKS] = (blocks, block)
    if left:
        shapes[TAIL] = (1, 1 << (left - 1).bit_length())
    return shapes


def rotate(tensors: Tensors, block: int, passes: int, key: int) -> Tensors:
    """Return all values as rotated rows: H S x / sqrt(D) per pass, with signs S and row length D."""
    values = flatten(tensors)
    shapes = rotated_shapes(len(values), block)
    rows = np.zeros(n_values(shapes), dtype=values.dtype)
    rows[: len(values)] = values
    parts = unflatten(rows, shapes)
    for index in range(passes):
        _flip(rows, _signs(len(rows), index, key))
        for part in parts.values():
            _transform(part)
    return parts


def rotate_back(rotated: Tensors, shapes: Shapes, passes: int, key: int) -> Tensors:
    """Invert `rotate`."""
    rows = flatten(rotated)
    parts = unflatten(rows, {name: part.shape for name, part in rotated.items()})
    for index in reversed(range(passes)):
        for part in parts.values():
            _transform(part)
        _flip(rows, _signs(len(rows), index, key))
    return unflatten(rows, shapes)


def _signs(count: int, index: int, key: int) -> Words:
    """Return the words of the key's stream of pass `index`, whose bits, lowest first, are ones for a minus."""
    return uniform_bits(stream(key, f"signs {index}"), np.arange(-(-count // 64)))


@compiled()
def _flip(rows: NDArray[Any], signs: Words) -> None:
    for place in range(len(rows)):
        minus = (signs[place >> 6] >> np.uint64(place & 63)) & np.uint64(1)
        rows[place] *= np.float32(1) - np.float32(2) * np.float32(minus)


def _transform(rows: NDArray[Any]) -> None:
    """Apply the orthonormal Walsh-Hadamard transform to each row, in place."""
    _hadamard(rows, rows.dtype.type(rows.shape[1] ** -0.5))


@compiled()
def _hadamard(rows: NDArray[Any], scale: Any) -> None:
    """Take two steps at a time, which halves the memory traffic, and multiply by `scale`."""
    length = rows.shape[1]
    for row in range(len(rows)):
        values = rows[row]
        half = 1
        while 2 * half < length:
            for start in range(0, length, 4 * half):
                for place in range(start, start + half):
                    first, second = values[place], values[place + half]
                    third, fourth = values[place + 2 * half], values[place + 3 * half]
                    low, high = first + second, third + fourth
                    values[place], values[place + 2 * half] = low + high, low - high
                    low, high = first - second, third - fourth
                    values[place + half], values[place + 3 * half] = low + high, low - high
            half *= 4
        if half < length:
            for place in range(half):
                first, second = values[place], values[place + half]
                values[place], values[place + half] = first + second, first - second
        for place in range(length):
            values[place] *= scale
