"""Values in fewer bits each: stochastic uniform quantisation to k levels, and casts to shorter floating-point types."""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.codecs.chain import NO_STATE, Codec, Quantiser, Shapes, Signal, Tensors, ValueStage, stream
from narrowcast.algorithms.codecs.wire import Reader, varint
from narrowcast.platform.compiled import compiled, read_only
from narrowcast.platform.types import Arrays, FloatArray, IntArray, PayloadError

MOST_LEVELS = 2**15
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Quantise(Quantiser):
    """Send norms, and the integer to which each value is rounded; a client may choose the levels, which are sent.

    For a vector x of d values with norm s, each value is sent as one of the 2k + 1 integers q between -k and k, the two
    nearest to k x_i / s at random, so that E[s q / k] = x; the mean squared error is at most
    min(d / 4k^2, sqrt(d) / k) ||x||^2.

    `norms`: values that share a norm: a tensor, its rows or columns (a vector is one row), or blocks of a given length.
    `scale`: the norm is the largest magnitude (`max`), or Euclidean as in the papers (`l2`). With `max`, `levels: 127`
    is int8 with a scale for each tensor, and `levels: 7` int4. With `l2` the norm grows with the number of values,
    nearly all are rounded to 0, and the same levels take fewer bits after `entropy` and leave a larger error.
    `rounding`: `stochastic` is unbiased. `dithered` is unbiased as well: the receiver knows the random numbers and
    subtracts them, which leaves an error of 1/12 of a squared step whatever the value, where `stochastic` leaves 1/6 on
    average and none at zero. `nearest` has the least error and is biased. `norm_type`: norms are rounded up, so that
    `bfloat16` halves their cost and keeps values unbiased.

    Sign and level are one of 2k + 1 symbols, so that a value takes log2(2k + 1) bits before entropy coding, and not the
    log2(k) of a count that leaves out signs and zero.

    Reference: Alistarh et al., QSGD, NeurIPS 2017, section 3.1, with the error bound sqrt(d) / k; the wireless report's
    eq. (4) and (5).
    """

    levels_allowed: ClassVar[range] = range(1, MOST_LEVELS + 1)

    kind: Literal["quantise"] = "quantise"
    levels: int = Field(
        7, ge=1, le=MOST_LEVELS, description="k; values are rounded to multiples of norm / k, 2 k + 1 symbols"
    )
    norms: Literal["tensor", "row", "column"] | Annotated[int, Field(ge=1)] = Field(
        "tensor", description="values that share a norm: a tensor, its rows or columns, or blocks of a given length"
    )
    scale: Literal["l2", "max"] = Field(
        "l2", description="norm: Euclidean, of few bits, or the largest magnitude, of int8 with 127 levels"
    )
    rounding: Literal["stochastic", "dithered", "nearest"] = Field(
        "stochastic", description="rounding to levels; nearest is biased, the others are not"
    )
    norm_type: Literal["float32", "bfloat16"] = Field("float32", description="type in which norms are sent")

    def write(self, tensors: Tensors, key: int, state: Arrays, rest: Codec) -> tuple[bytes, Arrays]:
        """Return the levels, all norms, and all symbols."""
        del state
        word, norms, streams, start = stream(key, "rounding")[0], [], [], 0
        for values in tensors.values():
            run, count = self._groups(values.shape)
            flat = read_only(values.ravel(), np.float32)
            norm = _upper_norms(flat, run, count, self.scale == "l2", self.norm_type == "bfloat16")
            streams.append(
                _quantise(
                    flat,
                    read_only(norm, np.float64),
                    run,
                    self.levels,
                    word,
                    np.uint64(start),
                    self.rounding == "nearest",
                )
            )
            norms.append(self._norm_bytes(norm))
            start += values.size
        symbols = rest.write_symbols(streams, 2 * self.levels + 1)
        return varint(self.levels) + b"".join(norms) + symbols, NO_STATE

    def read(self, reader: Reader, shapes: Shapes, key: int, rest: Codec) -> Tensors:
        """Return the dequantised values."""
        levels = reader.varint(MOST_LEVELS)
        if not levels:
            raise PayloadError("the payload has no levels")
        norms = [self._read_norms(reader, self._groups(shape)[1]) for shape in shapes.values()]
        streams = rest.read_symbols(reader, [prod(shape) for shape in shapes.values()], 2 * levels + 1)
        word, start, tensors = stream(key, "rounding")[0], 0, {}
        for (name, shape), norm, symbols in zip(shapes.items(), norms, streams, strict=True):
            values = _dequantise(
                read_only(symbols, np.int64),
                read_only(norm, np.float64),
                self._groups(shape)[0],
                levels,
                word,
                np.uint64(start),
                self.rounding == "dithered",
            )
            tensors[name] = values.reshape(shape)
            start += len(symbols)
        return tensors

    def max_bytes(self, shapes: Shapes, rest: Codec) -> int:
        """Return the bytes of the levels, the norms and the symbols at most."""
        norms = sum(self._groups(shape)[1] for shape in shapes.values()) * (4 if self.norm_type == "float32" else 2)
        symbols = rest.max_symbol_bytes([prod(shape) for shape in shapes.values()], 2 * self.levels + 1)
        return len(varint(self.levels)) + norms + symbols

    def _groups(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return how many consecutive values share a norm and the number of norms.

        Value i has norm i // run % count.
        """
        size = prod(shape)
        if not size:
            return 1, 0
        if isinstance(self.norms, int):
            return self.norms, -(-size // self.norms)
        if self.norms == "tensor" or len(shape) < 2:
            return size, 1
        row = size // shape[0]
        return (row, shape[0]) if self.norms == "row" else (1, row)

    def _norm_bytes(self, norms: FloatArray) -> bytes:
        words = norms.astype("<f4").view("<u4")
        return words.tobytes() if self.norm_type == "float32" else (words >> 16).astype("<u2").tobytes()

    def _read_norms(self, reader: Reader, count: int) -> FloatArray:
        if self.norm_type == "float32":
            norms = np.frombuffer(reader.take(4 * count), dtype="<f4").astype(np.float64)
        else:
            halves = np.frombuffer(reader.take(2 * count), dtype="<u2")
            norms = (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if not (np.isfinite(norms) & (norms >= 0)).all():
            raise PayloadError("the payload has norms that are negative or not finite")
        return norms


@compiled()
def _upper_norms(values: NDArray[np.float32], run: int, count: int, euclidean: bool, short: bool) -> FloatArray:
    """Return the norms as the receiver has them: float32 or, if `short`, bfloat16, not below the true ones."""
    exact = np.zeros(count, dtype=np.float64)
    for first in range(0, len(values), max(run * count, 1)):
        if run == 1:  # as below, in an order in which the loop becomes vector code
            for group in range(min(count, len(values) - first)):
                value = np.abs(np.float64(values[first + group]))
                exact[group] = exact[group] + value * value if euclidean else np.maximum(exact[group], value)
            continue
        for group in range(min(count, -(-(len(values) - first) // run))):
            total, start = exact[group], first + group * run
            for index in range(start, min(start + run, len(values))):
                value = np.abs(np.float64(values[index]))
                total = total + value * value if euclidean else np.maximum(total, value)
            exact[group] = total
    if euclidean:
        exact = np.sqrt(exact)
    norms = exact.astype(np.float32)
    words = norms.view(np.uint32)
    for group in range(count):
        if norms[group] < exact[group]:
            words[group] += np.uint32(1)  # the next float32: norms are not negative
        if short:
            words[group] = (words[group] + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    return norms.astype(np.float64)


@compiled(inline=True)
def _uniform(word: np.uint64, index: np.uint64) -> float:
    """Return a value uniform on [0, 1), from word `index` of the stream as in `seeds.uniform_bits`."""
    mixed = word + (index + np.uint64(1)) * _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    mixed = mixed ^ (mixed >> np.uint64(31))
    return np.float64(mixed >> np.uint64(11)) * 2.0**-53


@compiled()
def _quantise(
    values: NDArray[np.float32],
    norms: FloatArray,
    run: int,
    levels: int,
    word: np.uint64,
    first: np.uint64,
    nearest: bool,
) -> IntArray:
    """Return floor(k x / s + u) + k: the upper of the two nearest integers with the remainder as probability."""
    symbols = np.empty(len(values), dtype=np.int64)
    if run == 1:  # as below, in an order in which the loop becomes vector code
        for start in range(0, len(values), max(len(norms), 1)):
            for group in range(min(len(norms), len(values) - start)):
                index = start + group
                random = 0.5 if nearest else _uniform(word, first + np.uint64(index))
                symbols[index] = _symbol(values[index], norms[group], levels, random)
        return symbols
    for start in range(0, len(values), run):
        norm = norms[start // run % len(norms)]
        for index in range(start, min(start + run, len(values))):
            random = 0.5 if nearest else _uniform(word, first + np.uint64(index))
            symbols[index] = _symbol(values[index], norm, levels, random)
    return symbols


@compiled(inline=True)
def _symbol(value: np.float32, norm: float, levels: int, random: float) -> int:
    scaled = np.float64(value) / norm * levels if norm > 0 else 0.0
    return np.minimum(np.maximum(np.int64(np.floor(scaled + random)), -levels), levels) + levels


@compiled()
def _dequantise(
    symbols: IntArray,
    norms: FloatArray,
    run: int,
    levels: int,
    word: np.uint64,
    first: np.uint64,
    dithered: bool,
) -> NDArray[np.float32]:
    values = np.empty(len(symbols), dtype=np.float32)
    if run == 1:
        for start in range(0, len(symbols), max(len(norms), 1)):
            for group in range(min(len(norms), len(symbols) - start)):
                index = start + group
                level = np.float64(symbols[index] - levels)
                if dithered:
                    level += 0.5 - _uniform(word, first + np.uint64(index))
                values[index] = np.float32(norms[group] * (level / levels))
        return values
    for start in range(0, len(symbols), run):
        norm = norms[start // run % len(norms)]
        for index in range(start, min(start + run, len(symbols))):
            level = np.float64(symbols[index] - levels)
            if dithered:
                level += 0.5 - _uniform(word, first + np.uint64(index))
            values[index] = np.float32(norm * (level / levels))
    return values


_LARGEST_HALF = np.float32(65504)
_LARGEST_BFLOAT = np.uint32(0x7F7F0000).view(np.float32)


class Cast(ValueStage):
    """Send all values as `dtype`, rounded to nearest, ties to even; values beyond its range become its largest number.

    float16 is IEEE half precision.
    """

    gives: ClassVar[Signal] = "bytes"

    kind: Literal["cast"] = "cast"
    dtype: Literal["float32", "float16", "bfloat16"] = Field("float16", description="type of the values sent")

    def write(self, tensors: Tensors, key: int, state: Arrays, rest: Codec) -> tuple[bytes, Arrays]:
        """Return the values in order, little-endian."""
        del key, state, rest
        return b"".join(self._narrow(values.ravel()).tobytes() for values in tensors.values()), NO_STATE

    def read(self, reader: Reader, shapes: Shapes, key: int, rest: Codec) -> Tensors:
        """Return the values as float32."""
        del key, rest
        return {name: self._widen(reader, prod(shape)).reshape(shape) for name, shape in shapes.items()}

    def max_bytes(self, shapes: Shapes, rest: Codec) -> int:
        """Return 2 or 4 bytes per value."""
        del rest
        return (4 if self.dtype == "float32" else 2) * sum(map(prod, shapes.values()))

    def _narrow(self, values: NDArray[Any]) -> NDArray[np.generic]:
        if self.dtype == "float32":
            return values.astype("<f4")
        if self.dtype == "float16":
            return np.clip(values, -_LARGEST_HALF, _LARGEST_HALF).astype("<f2")
        words = np.clip(values, -_LARGEST_BFLOAT, _LARGEST_BFLOAT).astype(np.float32, copy=False).view(np.uint32)
        return ((words + np.uint32(0x7FFF) + (words >> 16 & np.uint32(1))) >> 16).astype("<u2")

    def _widen(self, reader: Reader, count: int) -> NDArray[np.float32]:
        if self.dtype == "float32":
            return reader.floats(count)
        data = reader.take(2 * count)
        if self.dtype == "float16":
            values = np.frombuffer(data, dtype="<f2").astype(np.float32)
        else:
            values = (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
        if not np.isfinite(values).all():
            raise PayloadError("the payload has values that are not finite")
        return values
