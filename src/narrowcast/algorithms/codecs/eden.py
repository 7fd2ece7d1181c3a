"""Rotated blocks: the randomised Hadamard rotation, and EDEN, which rounds the rotated values to centroids."""

from __future__ import annotations

from functools import cache
from math import erf, exp, pi, prod, sqrt
from statistics import NormalDist
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from narrowcast.algorithms.codecs.chain import (
    NO_STATE,
    Codec,
    Quantiser,
    Shapes,
    Tensors,
    Transform,
    flatten,
    n_values,
    stream,
    unflatten,
)
from narrowcast.algorithms.codecs.wire import Reader, varint
from narrowcast.platform.compiled import compiled
from narrowcast.platform.seeds import Words, uniform_bits
from narrowcast.platform.types import Arrays, FloatArray, IntArray, PayloadError

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

    The map is random signs, then the Walsh-Hadamard transform, so that values have similar magnitude.

    The rest of the chain gets `blocks` [b, block] and `tail` [1, t]. The tail holds the remaining values, padded with
    zeros to the next power of two; the padding is sent and counted.

    Differs from the papers: 1. blocks of `block` values instead of one block of all values: less padding and, if the
    next stage has a norm per row, a norm per block. 2. two passes of signs and transform: after one, a block with few
    large values is far from uniformly rotated, see `eden`.

    Reference: Ailon and Chazelle, STOC 2006; for distributed means, Suresh et al., ICML 2017 (arXiv:1611.00429).
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
    for column in range(len(rows)):
        minus = (signs[column >> 6] >> np.uint64(column & 63)) & np.uint64(1)
        rows[column] *= np.float32(1) - np.float32(2) * np.float32(minus)


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
                for index in range(start, start + half):
                    first, second = values[index], values[index + half]
                    third, fourth = values[index + 2 * half], values[index + 3 * half]
                    low, high = first + second, third + fourth
                    values[index], values[index + 2 * half] = low + high, low - high
                    low, high = first - second, third - fourth
                    values[index + half], values[index + 3 * half] = low + high, low - high
            half *= 4
        if half < length:
            for index in range(half):
                first, second = values[index], values[index + half]
                values[index], values[index + half] = first + second, first - second
        for index in range(length):
            values[index] *= scale


MOST_CENTROIDS = 256


class Eden(Quantiser):
    """Rotate blocks, and send each value as a centroid and each block's scale; DRIVE with `levels: 2`, 1 bit a value.

    The values of a rotated block are nearly normal, so the Lloyd-Max centroids of the standard normal (Max, IRE 1960)
    are the best levels. With distortion D(L) of L centroids the relative squared error is D for `min_mse` and
    1 / (1 - D) - 1 for `unbiased`: 0.571, 0.133, 0.0358, 0.0096 for 2, 4, 8 and 16 levels.

    `scale: unbiased` is ||x||^2 / <y, c> for rotated values y and their centroids c, whose mean over rotations is x.
    `min_mse` is <y, c> / <c, c>, for sums of few clients or with error feedback.

    Differs from the papers: 1. blocks of `block` values, each with a scale; the released code pads all values to one
    power of two, which a large `block` reproduces. 2. two passes of the rotation where the released code has one: the
    proofs need a uniform rotation, and after one pass (1, 1/2, 0, ...) loses a quarter of its energy at 1 bit, on
    average over all signs (tested). 3. fractional bits by any number of levels, in base L (3 levels are 1.6 bits),
    where EDEN mixes two widths; for less than 1 bit put `random_k` before it, as the released code does. 4. for EDEN's
    entropy-coded variant, whose levels are uniform, use `rotate`, `quantise` and `entropy`.

    Reference: Vargaftik et al., DRIVE, NeurIPS 2021 (arXiv:2105.08339); Vargaftik et al., EDEN, ICML 2022
    (arXiv:2108.08842).
    """

    levels_allowed: ClassVar[range] = range(2, MOST_CENTROIDS + 1)

    kind: Literal["eden"] = "eden"
    levels: int = Field(2, ge=2, le=MOST_CENTROIDS, description="number of centroids: 2 for 1 bit, 4 for 2 bits")
    scale: Literal["unbiased", "min_mse"] = Field(
        "unbiased", description="scale of a block: unbiased, or of least squared error"
    )
    block: Block = DEFAULT_BLOCK
    passes: Passes = 2

    def write(self, tensors: Tensors, key: int, state: Arrays, rest: Codec) -> tuple[bytes, Arrays]:
        """Return the number of levels, all scales, and all symbols."""
        del state
        points = centroids(self.levels)
        scales, streams = [], []
        for rows in rotate(tensors, self.block, self.passes, key).values():
            symbols, scale = self._round(rows.astype(np.float64), points)
            streams.append(symbols.ravel())
            scales.append(scale.astype("<f4").tobytes())
        return varint(self.levels) + b"".join(scales) + rest.write_symbols(streams, self.levels), NO_STATE

    def read(self, reader: Reader, shapes: Shapes, key: int, rest: Codec) -> Tensors:
        """Return the scaled centroids, rotated back."""
        levels = reader.varint(MOST_CENTROIDS)
        if levels < 2:
            raise PayloadError(f"the payload has {levels} levels, 2 to {MOST_CENTROIDS} are allowed")
        inner = rotated_shapes(sum(map(prod, shapes.values())), self.block)
        scales = [reader.floats(shape[0]) for shape in inner.values()]
        streams = rest.read_symbols(reader, [prod(shape) for shape in inner.values()], levels)
        points = centroids(levels)
        rotated = {
            name: (points[symbols].reshape(shape) * scale[:, None]).astype(rest.dtype)
            for (name, shape), scale, symbols in zip(inner.items(), scales, streams, strict=True)
        }
        return rotate_back(rotated, shapes, self.passes, key)

    def max_bytes(self, shapes: Shapes, rest: Codec) -> int:
        """Return the bytes of the number of levels, a float32 per block, and the symbols at most."""
        inner = rotated_shapes(sum(map(prod, shapes.values())), self.block)
        scales = 4 * sum(shape[0] for shape in inner.values())
        symbols = rest.max_symbol_bytes([prod(shape) for shape in inner.values()], self.levels)
        return len(varint(self.levels)) + scales + symbols

    def _round(self, rows: FloatArray, points: FloatArray) -> tuple[IntArray, FloatArray]:
        """Return the nearest centroid of each value over its row's deviation, and the scale of each row."""
        energy = np.einsum("bd,bd->b", rows, rows)
        deviation = np.sqrt(energy / rows.shape[1])
        symbols = _nearest(rows, np.where(deviation > 0, deviation, 1.0), (points[1:] + points[:-1]) / 2)
        chosen = points[symbols]
        along = np.einsum("bd,bd->b", rows, chosen)
        above, below = (energy, along) if self.scale == "unbiased" else (along, np.einsum("bd,bd->b", chosen, chosen))
        return symbols, np.divide(above, below, out=np.zeros_like(above), where=energy > 0)


@compiled()
def _nearest(rows: FloatArray, units: FloatArray, edges: FloatArray) -> IntArray:
    """Return the number of edges below each value over its row's unit, [b, d]."""
    symbols = np.zeros(rows.shape, dtype=np.int64)
    few = len(edges) < 16
    for row in range(len(rows)):
        for column in range(rows.shape[1]):
            value = rows[row, column] / units[row]
            if few:
                for edge in edges:
                    symbols[row, column] += value > edge
            else:
                symbols[row, column] = np.searchsorted(edges, value)
    return symbols


@cache
def centroids(levels: int) -> FloatArray:
    """Return the Lloyd-Max centroids of the standard normal, ascending and symmetric, computed by Newton's method."""
    points = np.array([sqrt(3) * NormalDist().inv_cdf((index + 0.5) / levels) for index in range(levels)])
    for _ in range(50):
        edges = (points[1:] + points[:-1]) / 2
        mass, density = _cells(edges)
        means = (density[:-1] - density[1:]) / mass
        # An edge e shifts the mean of the cell to its left by (e - mean) density / mass; a centroid moves e by half.
        left = 0.5 * density[1:-1] * (edges - means[:-1]) / mass[:-1]
        right = 0.5 * density[1:-1] * (means[1:] - edges) / mass[1:]
        diagonal = np.ones(levels)
        diagonal[:-1] -= left
        diagonal[1:] -= right
        step = _solve_tridiagonal(-right, diagonal, -left, points - means)
        points = points - step
        if np.abs(step).max() < 1e-14:
            break
    points = (points - points[::-1]) / 2
    points.flags.writeable = False
    return points


def _solve_tridiagonal(below: FloatArray, diagonal: FloatArray, above: FloatArray, right: FloatArray) -> FloatArray:
    """Return the solution of a tridiagonal system [L] by elimination without pivots.

    It takes O(L) steps, and its bits depend neither on the BLAS library nor on its threads: a payload may state any
    number of levels, and both sides need the same centroids.
    """
    pivots, values = diagonal.tolist(), right.tolist()
    for index in range(1, len(pivots)):
        factor = below[index - 1] / pivots[index - 1]
        pivots[index] -= factor * above[index - 1]
        values[index] -= factor * values[index - 1]
    values[-1] /= pivots[-1]
    for index in range(len(pivots) - 2, -1, -1):
        values[index] = (values[index] - above[index] * values[index + 1]) / pivots[index]
    return np.array(values)


def distortion(levels: int) -> float:
    """Return the mean squared error of rounding a standard normal to its centroids."""
    points = centroids(levels)
    mass, _ = _cells((points[1:] + points[:-1]) / 2)
    return float(1 - mass @ points**2)


def _cells(edges: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the standard normal's mass between edges [L] and its density at the edges and both infinities [L + 1]."""
    below = np.array([0.0, *((1 + erf(edge / sqrt(2))) / 2 for edge in edges), 1.0])
    density = np.array([0.0, *(exp(-edge * edge / 2) / sqrt(2 * pi) for edge in edges), 0.0])
    return np.diff(below), density
