"""Randomised Hadamard rotation: random signs, then the Walsh-Hadamard transform, so that all values are of one size.

Reference: Ailon and Chazelle, STOC 2006; for distributed means, Suresh et al., ICML 2017 (arXiv:1611.00429).
"""

from __future__ import annotations

from math import prod
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.stage import Shapes, Tensors, Transform, stream
from narrowcast.algorithms.codecs.wire import Reader
from narrowcast.algorithms.local_training.compiled import compiled
from narrowcast.platform.seeds import uniform_bits
from narrowcast.platform.types import Arrays

BLOCKS, TAIL = "blocks", "tail"
DEFAULT_BLOCK = 1024


def _power_of_two(block: int) -> int:
    if block & (block - 1):
        raise ValueError(f"should be a power of two, such as {1 << block.bit_length()}")
    return block


Block = Annotated[int, Field(ge=1, le=2**20), AfterValidator(_power_of_two)]
"""How many values are rotated together."""

Passes = Annotated[int, Field(ge=1, le=4)]
"""How many times a block gets random signs and is transformed."""


class Rotate(Transform):
    """Lay all tensors end to end, cut them into blocks and rotate each: an orthogonal map, its signs from the key.

    The rest of the chain gets `blocks` [b, block] and `tail` [1, t]: what is left over, padded with zeros to the next
    power of two, which are sent and paid for.

    Differs from the papers: 1. blocks of `block` values and not one of all: less padding and, where the next
    stage has a norm for each row, a norm a block. 2. two passes of signs and transform: after one, a block with few
    large values is far from uniformly rotated, see `eden`.
    """

    kind: Literal["rotate"] = "rotate"
    block: Block = DEFAULT_BLOCK
    passes: Passes = 2

    def inner_shapes(self, shapes: Shapes) -> Shapes:
        """The blocks that there are, and the tail."""
        return rotated_shapes(sum(map(prod, shapes.values())), self.block)

    def write(self, tensors: Tensors, key: int, state: Arrays, rest: Codec) -> tuple[bytes, Arrays]:
        """Nothing of its own."""
        return rest.write(rotate(tensors, self.block, self.passes, key), key, state)

    def read(self, reader: Reader, shapes: Shapes, key: int, rest: Codec) -> Tensors:
        """The tensors, rotated back."""
        return rotate_back(rest.read(reader, self.inner_shapes(shapes), key), shapes, self.passes, key)


def rotated_shapes(count: int, block: int) -> Shapes:
    """The shapes that `rotate` gives for so many values in all."""
    blocks, left = divmod(count, block)
    shapes: dict[str, tuple[int, ...]] = {}
    if blocks:
        shapes[BLOCKS] = (blocks, block)
    if left:
        shapes[TAIL] = (1, 1 << (left - 1).bit_length())
    return shapes


def rotate(tensors: Tensors, block: int, passes: int, key: int) -> Tensors:
    """All values as rotated rows: H S x / sqrt(D) in each pass, S its signs and D the length of a row."""
    count = sum(values.size for values in tensors.values())
    shapes = rotated_shapes(count, block)
    rows = np.zeros(sum(map(prod, shapes.values())), dtype=np.float32)
    if count:
        rows[:count] = np.concatenate([values.ravel() for values in tensors.values()])
    parts = _cut(rows, shapes)
    for index in range(passes):
        rows *= _signs(len(rows), index, key)
        for part in parts.values():
            _transform(part)
    return parts


def rotate_back(rotated: Tensors, shapes: Shapes, passes: int, key: int) -> Tensors:
    """The inverse of `rotate`."""
    rows = np.concatenate([part.ravel() for part in rotated.values()] or [np.empty(0, np.float32)])
    parts = _cut(rows, {name: part.shape for name, part in rotated.items()})
    for index in reversed(range(passes)):
        for part in parts.values():
            _transform(part)
        rows *= _signs(len(rows), index, key)
    return _cut(rows, shapes)


def _cut(values: NDArray[np.float32], shapes: Shapes) -> Tensors:
    parts, place = {}, 0
    for name, shape in shapes.items():
        parts[name] = values[place : place + prod(shape)].reshape(shape)
        place += prod(shape)
    return parts


def _signs(count: int, index: int, key: int) -> NDArray[np.float32]:
    """1 or -1 for each value: the bits of the words of a stream of the key, one for each pass."""
    words = uniform_bits(stream(key, f"signs {index}"), np.arange(-(-count // 64))).astype("<u8")
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:count]
    return np.float32(1) - np.float32(2) * bits.astype(np.float32)


def _transform(rows: NDArray[np.float32]) -> None:
    """The orthonormal Walsh-Hadamard transform of each row, in place."""
    _hadamard(rows)
    rows *= np.float32(rows.shape[1] ** -0.5)


@compiled()
def _hadamard(rows: NDArray[np.float32]) -> None:
    length = rows.shape[1]
    for row in range(len(rows)):
        values = rows[row]
        half = 1
        while half < length:
            for start in range(0, length, 2 * half):
                for place in range(start, start + half):
                    left, right = values[place], values[place + half]
                    values[place] = left + right
                    values[place + half] = left - right
            half *= 2
