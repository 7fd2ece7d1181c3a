"""Whole tensors on the wire: float32 values in a fixed order, whose shapes both sides know from the model."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.types import PayloadError

# magic, has a seed, number of values, number of examples behind them
_HEADER = struct.Struct("<2sBQI")
_MAGIC = b"nd"
_SEED_BYTES = 8


@dataclass(frozen=True)
class DensePayload:
    """All values of some tensors in order; `seed` lets the receiver regenerate a basis."""

    values: NDArray[np.float32]
    examples: int = 0
    seed: int | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, NDArray[Any]], examples: int = 0, seed: int | None = None) -> Self:
        """Return the payload of tensors in the order of their names."""
        flat = [np.asarray(tensors[name], dtype=np.float32).ravel() for name in sorted(tensors)]
        return cls(np.concatenate(flat) if flat else np.empty(0, dtype=np.float32), examples, seed)

    def wire_bits(self) -> int:
        """Return eight times the length of `to_bytes()`, computed without packing."""
        return dense_wire_bits(self.values.size, seed=self.seed is not None)

    def to_bytes(self) -> bytes:
        """Return the header, the seed and the values, little-endian."""
        seed = b"" if self.seed is None else self.seed.to_bytes(_SEED_BYTES, "little")
        header = _HEADER.pack(_MAGIC, self.seed is not None, self.values.size, self.examples)
        return header + seed + np.ascontiguousarray(self.values, dtype="<f4").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the payload that `to_bytes` packed; raise `PayloadError` if the bytes are malformed."""
        if len(data) < _HEADER.size:
            raise PayloadError(f"a payload of {len(data)} bytes is shorter than its header ({_HEADER.size})")
        magic, has_seed, size, examples = _HEADER.unpack_from(data)
        if magic != _MAGIC or has_seed > 1:
            raise PayloadError("these bytes do not start with the header of a dense payload")
        rest = memoryview(data)[_HEADER.size :]
        seed: int | None = None
        if has_seed:
            if len(rest) < _SEED_BYTES:
                raise PayloadError("the payload ends inside its seed")
            seed, rest = int.from_bytes(rest[:_SEED_BYTES], "little"), rest[_SEED_BYTES:]
        if len(rest) != 4 * size:
            raise PayloadError(f"the payload should end with {4 * size} bytes of values, got {len(rest)}")
        return cls(np.frombuffer(rest, dtype="<f4").astype(np.float32), examples, seed)

    def tensors(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, NDArray[np.float32]]:
        """Return the tensors; raise `PayloadError` if the values do not fit these shapes."""
        sizes = {name: prod(shapes[name]) for name in sorted(shapes)}
        if sum(sizes.values()) != self.values.size:
            raise PayloadError(f"the payload has {self.values.size} values, the tensors {sum(sizes.values())}")
        parts = np.split(self.values, np.cumsum(list(sizes.values()))[:-1])
        return {name: part.reshape(shapes[name]) for name, part in zip(sizes, parts, strict=True)}


def dense_wire_bits(n_values: int, *, seed: bool = False) -> int:
    """Return the size of a `DensePayload` of this many values."""
    return 8 * (_HEADER.size + seed * _SEED_BYTES + 4 * n_values)
