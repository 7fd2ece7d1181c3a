"""The header of every message between clients and server: the same bytes for each kind, counted like all others.

It has what the receiver does not know before it reads on. The sender, the round and the length are those of the link.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import numpy as np

from narrowcast.algorithms.codecs.wire import Reader
from narrowcast.platform.types import Arrays, Dtype, PayloadError

_FORMAT = struct.Struct("<BBHI")  # kind, flags, columns, examples
HEADER_BYTES = _FORMAT.size
HEADER_BITS = 8 * HEADER_BYTES
HAS_SEED = 128
"""The flag of messages with a seed of `SEED_BYTES`, from which the receiver regenerates a basis."""
SEED_BYTES = 8
HAS_FLOAT64 = 64
"""The flag of tensors of float64, of 8 bytes each; other messages have values of float32, or decode to it."""
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
MAX_EXAMPLES = 2**32 - 1


class MessageKind(IntEnum):
    """The kinds of payload."""

    ROWS = 1
    TENSORS = 2
    CODED_ROWS = 3
    CODED_TENSORS = 4
    CODED_MATRIX = 5
    GRID_POINTS = 6


@dataclass(frozen=True)
class MessageHeader:
    """Kind and flags of a payload, its number of columns (0 for none, at most 65,535), and the sender's examples."""

    kind: MessageKind
    flags: int = 0
    columns: int = 0
    examples: int = 0

    def to_bytes(self) -> bytes:
        """Return the header, little-endian, `HEADER_BYTES` long."""
        return _FORMAT.pack(self.kind, self.flags, self.columns, self.examples)

    @classmethod
    def read(cls, reader: Reader, kind: MessageKind, flags: int = 0) -> Self:
        """Read the header of a message of this kind with at most these `flags`; raise `PayloadError` for another."""
        its_kind, its_flags, columns, examples = _FORMAT.unpack(reader.take(HEADER_BYTES))
        if its_kind != kind or its_flags & ~flags:
            name = kind.name.lower().replace("_", " ")
            raise PayloadError(f"these bytes do not start with the header of a message of {name}")
        return cls(kind, its_flags, columns, examples)


def tensor_flags(dtype: Dtype, seed: int | None) -> int:
    """Return the flags of a message of tensors of this type."""
    return (dtype == FLOAT64) * HAS_FLOAT64 | (seed is not None) * HAS_SEED


def tensor_dtype(header: MessageHeader) -> Dtype:
    """Return the type of the tensors of a message, float32 or float64."""
    return FLOAT64 if header.flags & HAS_FLOAT64 else FLOAT32


def dtype_of(tensors: Arrays) -> Dtype:
    """Return the type in which tensors are sent: float64 if all of them are, else float32."""
    return FLOAT64 if tensors and all(values.dtype == FLOAT64 for values in tensors.values()) else FLOAT32


def write_seed(seed: int | None) -> bytes:
    """Return the seed's bytes; none for None."""
    return b"" if seed is None else seed.to_bytes(SEED_BYTES, "little")


def read_seed(reader: Reader, header: MessageHeader) -> int | None:
    """Return the seed of a message; None if its header has no flag of one."""
    return int.from_bytes(reader.take(SEED_BYTES), "little") if header.flags & HAS_SEED else None
