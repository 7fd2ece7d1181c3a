"""Integers on the wire: values rounded to a public grid, entropy-coded.

A server and a client that share the grid need nothing else: a model, a part of it, and the change between two of its
versions are all integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.entropy import Entropy
from narrowcast.algorithms.codecs.message_header import HAS_SEED, MessageHeader, MessageKind, read_seed, write_seed
from narrowcast.algorithms.codecs.stage import LARGEST_VALUE
from narrowcast.algorithms.codecs.wire import Reader

GridPoints = NDArray[np.int32]
LARGEST_POINT = 2**15 - 1
"""Largest magnitude of an integer; beyond it values are clipped, and the next message sends the rest."""


def grid_points(offsets: NDArray[np.float32], step: float, shifts: NDArray[np.float32]) -> GridPoints:
    """Return the integers nearest to `offsets` / `step` + `shifts`."""
    scaled = np.rint(np.clip(offsets, -LARGEST_VALUE, LARGEST_VALUE) / np.float32(step) + shifts)
    return np.clip(scaled, -LARGEST_POINT, LARGEST_POINT).astype(np.int32)


def grid_values(points: GridPoints, step: float, shifts: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the offsets that these integers stand for."""
    return np.float32(step) * (points.astype(np.float32) - shifts)


@dataclass(frozen=True)
class GridPayload:
    """Integers of one or several tensors, each coded with a model of its own; their shapes are known to both sides.

    `seed` lets the receiver regenerate a basis; None sends none.
    """

    points: Sequence[GridPoints]
    seed: int | None = None

    def wire_bits(self) -> int:
        """Return eight times the length of `to_bytes()`."""
        return 8 * len(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the header, which has the largest magnitude, the seed if there is one, and the coded integers."""
        most = max((int(np.abs(each).max()) for each in self.points if each.size), default=0)
        streams = [each.ravel().astype(np.int64) + most for each in self.points]
        header = MessageHeader(MessageKind.GRID_POINTS, (self.seed is not None) * HAS_SEED, columns=most)
        return header.to_bytes() + write_seed(self.seed) + Entropy().write_symbols(streams, 2 * most + 1)

    @classmethod
    def from_bytes(cls, data: bytes, shapes: Sequence[tuple[int, ...]] = ()) -> Self:
        """Return the payload of tensors of these shapes; raise `PayloadError` if the bytes are malformed."""
        reader = Reader(data)
        header = MessageHeader.read(reader, MessageKind.GRID_POINTS, HAS_SEED)
        seed, most = read_seed(reader, header), header.columns
        streams = Entropy().read_symbols(reader, [prod(shape) for shape in shapes], 2 * most + 1)
        reader.finish()
        points = [
            (symbols - most).astype(np.int32).reshape(shape) for symbols, shape in zip(streams, shapes, strict=True)
        ]
        return cls(points, seed)
