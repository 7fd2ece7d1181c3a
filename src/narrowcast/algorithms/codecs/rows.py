"""Rows of a matrix on the wire: the row mask and the packed float32 values."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.types import IntArray, PayloadError

Count = TypeVar("Count", int, IntArray)

RowLayout = Literal["all", "touched"]
"""`all` sends every row, zeros included; `touched` sends a bit per row and the rows whose bit is set."""

# magic, flags, rank, number of rows of the matrix, number of examples behind the values
_HEADER = struct.Struct("<2sBHII")
_MAGIC = b"nr"
_HAS_MASK, _HAS_ALL_ROWS, _HAS_SEED = 1, 2, 4
_SEED_BYTES = 8


@dataclass(frozen=True)
class RowsPayload:
    """Some rows of an [n_rows, rank] matrix, with a bit per row if the receiver needs to know which.

    Shapes: rows [m] ascending; values [m, rank] float32. `mask` is needed by `touched`, and by an aggregation that
    divides each row by the number of clients that touched it. `seed` lets the receiver regenerate a basis; None sends
    none.
    """

    n_rows: int
    rows: IntArray
    values: NDArray[np.float32]
    layout: RowLayout
    mask: bool
    examples: int = 0
    seed: int | None = None

    def wire_bits(self) -> int:
        """Return eight times the length of `to_bytes()`, computed without packing."""
        return rows_wire_bits(
            n_rows=self.n_rows,
            sent_rows=len(self.rows),
            rank=self.values.shape[1],
            layout=self.layout,
            mask=self.mask,
            seed=self.seed is not None,
        )

    def to_bytes(self) -> bytes:
        """Return the header, the seed, the mask and the values, little-endian."""
        has_mask = self.mask or self.layout == "touched"
        flags = has_mask * _HAS_MASK | (self.layout == "all") * _HAS_ALL_ROWS | (self.seed is not None) * _HAS_SEED
        parts = [_HEADER.pack(_MAGIC, flags, self.values.shape[1], self.n_rows, self.examples)]
        if self.seed is not None:
            parts.append(self.seed.to_bytes(_SEED_BYTES, "little"))
        if has_mask:
            touched = np.zeros(self.n_rows, dtype=bool)
            touched[self.rows] = True
            parts.append(np.packbits(touched, bitorder="little").tobytes())
        values = self.values
        if self.layout == "all":
            values = np.zeros((self.n_rows, self.values.shape[1]), dtype=np.float32)
            values[self.rows] = self.values
        parts.append(np.ascontiguousarray(values, dtype="<f4").tobytes())
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the payload that `to_bytes` packed; raise `PayloadError` if the bytes are malformed."""
        if len(data) < _HEADER.size:
            raise PayloadError(f"a payload of {len(data)} bytes is shorter than its header ({_HEADER.size})")
        magic, flags, rank, n_rows, examples = _HEADER.unpack_from(data)
        if magic != _MAGIC or flags > 7 or not flags & (_HAS_MASK | _HAS_ALL_ROWS):
            raise PayloadError("these bytes do not start with the header of a rows payload")
        rest = memoryview(data)[_HEADER.size :]
        seed: int | None = None
        if flags & _HAS_SEED:
            if len(rest) < _SEED_BYTES:
                raise PayloadError("the payload ends inside its seed")
            seed, rest = int.from_bytes(rest[:_SEED_BYTES], "little"), rest[_SEED_BYTES:]
        rows: IntArray | None = None
        if flags & _HAS_MASK:
            mask_bytes = -(-n_rows // 8)
            if len(rest) < mask_bytes:
                raise PayloadError("the payload ends inside its row mask")
            bits = np.unpackbits(np.frombuffer(rest[:mask_bytes], dtype=np.uint8), bitorder="little")
            if bits[n_rows:].any():
                raise PayloadError("the row mask has bits beyond the last row")
            rows, rest = np.flatnonzero(bits[:n_rows]), rest[mask_bytes:]
        sent = n_rows if rows is None or flags & _HAS_ALL_ROWS else len(rows)
        if len(rest) != 4 * sent * rank:
            raise PayloadError(f"the payload should end with {4 * sent * rank} bytes of values, got {len(rest)}")
        values = np.frombuffer(rest, dtype="<f4").astype(np.float32).reshape(sent, rank)
        if rows is None:
            rows = np.arange(n_rows if rank else 0)  # only now is n_rows known to be no bigger than the bytes
        if flags & _HAS_ALL_ROWS:
            values = values[rows]
        layout: RowLayout = "all" if flags & _HAS_ALL_ROWS else "touched"
        return cls(n_rows, rows, values, layout, bool(flags & _HAS_MASK), examples, seed)


def rows_wire_bits(
    *, n_rows: int, sent_rows: Count, rank: Count, layout: RowLayout, mask: bool, seed: bool = False
) -> Count:
    """Return the size of a `RowsPayload` of these dimensions, which a client knows before training."""
    mask_bytes = -(-n_rows // 8) if mask or layout == "touched" else 0
    value_bytes = 4 * rank * (n_rows if layout == "all" else sent_rows)
    return 8 * (value_bytes + _HEADER.size + seed * _SEED_BYTES + mask_bytes)
