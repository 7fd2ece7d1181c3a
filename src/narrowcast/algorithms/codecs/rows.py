"""Rows of a matrix on the wire: the row mask and the packed float32 values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.codecs.message_header import (
    HAS_SEED,
    HEADER_BYTES,
    SEED_BYTES,
    MessageHeader,
    MessageKind,
    read_seed,
    write_seed,
)
from narrowcast.algorithms.codecs.wire import Count, Reader, varint, varint_bytes
from narrowcast.platform.types import IntArray, PayloadError

RowLayout = Annotated[
    Literal["all", "touched"],
    Field(description="rows that are sent: all of them, or those that the client's training changed"),
]
"""`all` sends every row, zeros included; `touched` sends a bit per row and the rows whose bit is set."""

_HAS_MASK, _HAS_ALL_ROWS = 1, 2
_MOST_ROWS = 2**32 - 1


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
        """Return the header, the number of rows of the matrix, the seed, the mask and the values, little-endian."""
        has_mask = self.mask or self.layout == "touched"
        flags = has_mask * _HAS_MASK | (self.layout == "all") * _HAS_ALL_ROWS | (self.seed is not None) * HAS_SEED
        header = MessageHeader(MessageKind.ROWS, flags, self.values.shape[1], self.examples)
        parts = [header.to_bytes(), varint(self.n_rows), write_seed(self.seed)]
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
        reader = Reader(data)
        header = MessageHeader.read(reader, MessageKind.ROWS, _HAS_MASK | _HAS_ALL_ROWS | HAS_SEED)
        if not header.flags & (_HAS_MASK | _HAS_ALL_ROWS):
            raise PayloadError("the payload says neither which rows it has nor that it has all")
        n_rows, rank, seed = reader.varint(_MOST_ROWS), header.columns, read_seed(reader, header)
        rows: IntArray | None = None
        if header.flags & _HAS_MASK:
            bits = np.unpackbits(np.frombuffer(reader.take(-(-n_rows // 8)), dtype=np.uint8), bitorder="little")
            if bits[n_rows:].any():
                raise PayloadError("the row mask has bits beyond the last row")
            rows = np.flatnonzero(bits[:n_rows])
        sent, rest = n_rows if rows is None or header.flags & _HAS_ALL_ROWS else len(rows), reader.rest()
        if len(rest) != 4 * sent * rank:
            raise PayloadError(f"the payload should end with {4 * sent * rank} bytes of values, got {len(rest)}")
        values = np.frombuffer(rest, dtype="<f4").astype(np.float32).reshape(sent, rank)
        if rows is None:
            rows = np.arange(n_rows if rank else 0)  # only now is n_rows known to be no bigger than the bytes
        if header.flags & _HAS_ALL_ROWS:
            values = values[rows]
        layout: RowLayout = "all" if header.flags & _HAS_ALL_ROWS else "touched"
        return cls(n_rows, rows, values, layout, bool(header.flags & _HAS_MASK), header.examples, seed)


def rows_wire_bits(
    *, n_rows: int, sent_rows: Count, rank: Count, layout: RowLayout, mask: bool, seed: bool = False
) -> Count:
    """Return the size of a `RowsPayload` of these dimensions, which a client knows before training."""
    mask_bytes = -(-n_rows // 8) if mask or layout == "touched" else 0
    value_bytes = 4 * rank * (n_rows if layout == "all" else sent_rows)
    return 8 * (value_bytes + HEADER_BYTES + varint_bytes(n_rows) + seed * SEED_BYTES + mask_bytes)
