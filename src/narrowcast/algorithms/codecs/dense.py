"""Whole tensors on the wire: values in a fixed order, whose shapes both sides know from the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.message_header import (
    FLOAT32,
    HAS_FLOAT64,
    HAS_SEED,
    HEADER_BYTES,
    SEED_BYTES,
    MessageHeader,
    MessageKind,
    dtype_of,
    read_seed,
    tensor_dtype,
    tensor_flags,
    write_seed,
)
from narrowcast.algorithms.codecs.wire import Count, Reader, varint, varint_bytes
from narrowcast.platform.types import Dtype, PayloadError

_MOST_VALUES = 2**35 - 1


@dataclass(frozen=True)
class DensePayload:
    """All values of some tensors in order, float32 or float64; `seed` lets the receiver regenerate a basis."""

    values: NDArray[Any]
    examples: int = 0
    seed: int | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, NDArray[Any]], examples: int = 0, seed: int | None = None) -> Self:
        """Return the payload of tensors in the order of their names, in float64 if all of them are."""
        dtype = dtype_of(tensors)
        flat = [np.asarray(tensors[name], dtype=dtype).ravel() for name in sorted(tensors)]
        return cls(np.concatenate(flat) if flat else np.empty(0, dtype=dtype), examples, seed)

    def wire_bits(self) -> int:
        """Return eight times the length of `to_bytes()`, computed without packing."""
        return dense_wire_bits(self.values.size, self.values.dtype, seed=self.seed is not None)

    def to_bytes(self) -> bytes:
        """Return the header, the number of values, the seed and the values, little-endian."""
        dtype = self.values.dtype
        header = MessageHeader(MessageKind.TENSORS, tensor_flags(dtype, self.seed), examples=self.examples)
        values = np.ascontiguousarray(self.values, dtype=dtype.newbyteorder("<")).tobytes()
        return header.to_bytes() + varint(self.values.size) + write_seed(self.seed) + values

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the payload that `to_bytes` packed; raise `PayloadError` if the bytes are malformed."""
        reader = Reader(data)
        header = MessageHeader.read(reader, MessageKind.TENSORS, HAS_SEED | HAS_FLOAT64)
        dtype = tensor_dtype(header)
        size, seed, rest = reader.varint(_MOST_VALUES), read_seed(reader, header), reader.rest()
        if len(rest) != dtype.itemsize * size:
            raise PayloadError(f"the payload should end with {dtype.itemsize * size} bytes of values, got {len(rest)}")
        return cls(np.frombuffer(rest, dtype=dtype.newbyteorder("<")).astype(dtype), header.examples, seed)

    def tensors(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, NDArray[Any]]:
        """Return the tensors; raise `PayloadError` if the values do not fit these shapes."""
        sizes = {name: prod(shapes[name]) for name in sorted(shapes)}
        if sum(sizes.values()) != self.values.size:
            raise PayloadError(f"the payload has {self.values.size} values, the tensors {sum(sizes.values())}")
        parts = np.split(self.values, np.cumsum(list(sizes.values()))[:-1])
        return {name: part.reshape(shapes[name]) for name, part in zip(sizes, parts, strict=True)}


def dense_wire_bits(n_values: Count, dtype: Dtype = FLOAT32, *, seed: bool = False) -> Count:
    """Return the size of a `DensePayload` of this many values."""
    return 8 * (HEADER_BYTES + varint_bytes(n_values) + seed * SEED_BYTES + dtype.itemsize * n_values)
