"""The payloads of updates: whole tensors, rows and matrices, plain or through a codec, and integers of a grid.

Every payload starts with the header of `wire`. Shapes of whole tensors are known to both sides from the model; they are
sent in the order of their names.

Letters: N or n_rows rows of a matrix, m of them sent, k columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.codecs.budget import ClientEncoder
from narrowcast.algorithms.codecs.chain import LARGEST_VALUE, Codec, EncodedUpdate
from narrowcast.algorithms.codecs.entropy import Entropy
from narrowcast.algorithms.codecs.wire import (
    FLOAT32,
    HAS_FLOAT64,
    HAS_SEED,
    HEADER_BYTES,
    SEED_BYTES,
    Count,
    MessageHeader,
    MessageKind,
    Reader,
    dtype_of,
    read_indices,
    read_seed,
    tensor_dtype,
    tensor_flags,
    varint,
    varint_bytes,
    write_indices,
    write_seed,
)
from narrowcast.platform.types import Arrays, BoolArray, Dtype, IntArray, Payload, PayloadError

_MOST_VALUES = 2**35 - 1


@dataclass(frozen=True)
class DensePayload(Payload):
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


RowLayout = Annotated[
    Literal["all", "touched"],
    Field(description="rows that are sent: all of them, or those that the client's training changed"),
]
"""`all` sends every row, zeros included; `touched` sends a bit per row and the rows whose bit is set."""

_HAS_MASK, _HAS_ALL_ROWS = 1, 2
_MOST_ROWS = 2**32 - 1


@dataclass(frozen=True)
class RowsPayload(Payload):
    """Some rows of an [n_rows, rank] matrix as float32, with a bit per row if the receiver needs to know which.

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


LIKELY, OTHER, BASIS = "likely", "other", "basis"
"""The tensors that a codec sees: values of rows that the receiver expects, values of other rows, and a basis.

If the receiver expects none, or a stage needs all rows at once, `LIKELY` has the values of all rows.
"""

LikelyRows = Callable[[int], BoolArray]
"""The rows [N] that the receiver expects of a client with so many positives, from public streams alone."""


@dataclass(frozen=True)
class RowUpdate:
    """The rows that one client changed, of a matrix of `n_rows`.

    `positives` are the client's examples. `likely`, if the receiver expects rows, gives those of so many positives.

    Shapes: rows [m] ascending; values [m, k].
    """

    rows: IntArray
    values: NDArray[np.float32]
    n_rows: int
    positives: int = 0
    likely: LikelyRows | None = None

    @property
    def unexpected(self) -> IntArray:
        """The rows that the receiver does not expect."""
        return self.rows if self.likely is None else self.rows[~self.likely(self.positives)[self.rows]]


def encode_rows(
    encoder: ClientEncoder,
    update: RowUpdate,
    *,
    basis: NDArray[np.float32] | None = None,
    finest: int | None = None,
) -> tuple[EncodedUpdate, Arrays] | None:
    """Pack an update within the client's budget; None if no levels, up to `finest`, fit.

    Sent are the header, the rows as the shortest of three index lists, and the codec's bytes. Of likely rows those that
    are absent are listed instead; the receiver regenerates them from the number of positives, which the header has.
    `basis` [d, k] is sent too if the values are coordinates in a basis that the receiver does not know. Also return the
    client's codec state once the update is sent. Raise `UnsendableUpdateError` for values that are not finite.
    """
    rows, values = update.rows, update.values
    sent = np.zeros(update.n_rows, dtype=bool)
    sent[rows] = True
    header = MessageHeader(MessageKind.CODED_ROWS, columns=values.shape[1], examples=update.positives)
    head, tensors = header.to_bytes(), {LIKELY: values}
    if update.likely is None:
        head += _index_list(sent)
    else:
        likely = update.likely(update.positives)
        head += _index_list(~sent[likely]) + _index_list(sent[~likely])
        if not encoder.codec.of_whole:
            tensors = {LIKELY: values[likely[rows]], OTHER: values[~likely[rows]]}
    if basis is not None:
        tensors[BASIS] = basis
    fitting = encoder.encode(tensors, head, finest)
    return None if fitting is None else (EncodedUpdate(fitting[0]), fitting[1])


def decode_rows(
    codec: Codec,
    data: bytes,
    n_rows: int,
    max_columns: int,
    key: int,
    *,
    likely: LikelyRows | None = None,
    dimension: int | None = None,
) -> tuple[IntArray, NDArray[np.float32]]:
    """Return the rows [m] of `n_rows` and their values [m, k] as the receiver gets them.

    Everything that it needs besides the bytes is public. With a `dimension` d the values come with a basis [d, k], and
    are returned as [m, d]. Raise `PayloadError` for bytes that `encode_rows` cannot have written.
    """
    reader = Reader(data)
    header = MessageHeader.read(reader, MessageKind.CODED_ROWS)
    columns = header.columns
    if columns > max_columns:
        raise PayloadError(f"the payload has {columns} columns where at most {max_columns} are allowed")
    if likely is not None and header.examples > n_rows:
        raise PayloadError(f"the payload is of {header.examples} positives among {n_rows} rows")
    expected = np.zeros(n_rows, dtype=bool) if likely is None else likely(header.examples)
    sent = expected.copy()
    if likely is not None:
        sent[np.flatnonzero(expected)[_read_index_list(reader, int(expected.sum()))]] = False
    sent[np.flatnonzero(~expected)[_read_index_list(reader, int((~expected).sum()))]] = True
    rows, whole = np.flatnonzero(sent), likely is None or codec.of_whole
    first = np.ones(len(rows), dtype=bool) if whole else expected[rows]
    shapes = {LIKELY: (int(first.sum()), columns)}
    if not whole:
        shapes[OTHER] = (int((~first).sum()), columns)
    if dimension is not None:
        shapes[BASIS] = (dimension, columns)
    tensors = codec.decode(bytes(reader.rest()), shapes, key)
    values = tensors[LIKELY]
    if not whole:
        values = np.empty((len(rows), columns), dtype=np.float32)
        values[first], values[~first] = tensors[LIKELY], tensors[OTHER]
    return rows, values if dimension is None else values @ tensors[BASIS].T


def _index_list(marked: BoolArray) -> bytes:
    indices = np.flatnonzero(marked)
    return varint(len(indices)) + write_indices(indices, len(marked), "smallest")


def _read_index_list(reader: Reader, count: int) -> IntArray:
    return read_indices(reader, reader.varint(count), count, "smallest")


@dataclass(frozen=True)
class TensorUpdate:
    """The tensors that one client changed, its examples, and its rank, 0 if it has none."""

    tensors: Arrays
    examples: int
    rank: int = 0


@dataclass(frozen=True)
class CodedTensors(Payload):
    """Whole tensors through a codec: examples, rank (0 for none) and the codec's bytes.

    `seed` lets the receiver regenerate a basis; None sends none. The codec's bytes decode to values of `dtype`.
    """

    examples: int
    rank: int
    coded: bytes
    seed: int | None = None
    dtype: Dtype = FLOAT32

    def wire_bits(self) -> int:
        """Return eight times the length of `to_bytes()`."""
        return 8 * len(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the header, the seed if there is one, then the codec's bytes."""
        flags = tensor_flags(self.dtype, self.seed)
        header = MessageHeader(MessageKind.CODED_TENSORS, flags, self.rank, self.examples)
        return header.to_bytes() + write_seed(self.seed) + self.coded

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Split off the header; raise `PayloadError` if it is malformed. `Codec.decode` reads the rest."""
        reader = Reader(data)
        header = MessageHeader.read(reader, MessageKind.CODED_TENSORS, HAS_SEED | HAS_FLOAT64)
        seed = read_seed(reader, header)
        return cls(header.examples, header.columns, bytes(reader.rest()), seed, tensor_dtype(header))


def encode_tensors(encoder: ClientEncoder, update: TensorUpdate) -> tuple[CodedTensors, Arrays] | None:
    """Pack tensors within the client's budget; None if not even the coarsest levels fit.

    Also return the client's codec state once the tensors are sent. Raise `UnsendableUpdateError` for values that are
    not finite.
    """
    head = CodedTensors(update.examples, update.rank, b"", dtype=encoder.codec.dtype).to_bytes()
    fitting = encoder.encode(update.tensors, head)
    return None if fitting is None else (CodedTensors.from_bytes(fitting[0]), fitting[1])


WHOLE = "matrix"
"""The tensor that a codec sees."""


def encode_matrix(
    encoder: ClientEncoder, rows: IntArray, values: NDArray[np.float32], n_rows: int, examples: int = 0
) -> EncodedUpdate | None:
    """Pack a matrix [n_rows, k] with `values` [m, k] in the trained `rows` and zeros elsewhere, within the budget.

    Untouched rows are sent too, and a bit per row: trained or not.

    Return None if no levels of the codec fit. Raise `UnsendableUpdateError` for values that are not finite.
    """
    trained = np.zeros(n_rows, dtype=bool)
    trained[rows] = True
    matrix = np.zeros((n_rows, values.shape[1]), dtype=np.float32)
    matrix[rows] = values
    header = MessageHeader(MessageKind.CODED_MATRIX, columns=values.shape[1], examples=examples)
    fitting = encoder.encode({WHOLE: matrix}, header.to_bytes() + np.packbits(trained, bitorder="little").tobytes())
    return None if fitting is None else EncodedUpdate(fitting[0])


def decode_matrix(
    codec: Codec, data: bytes, n_rows: int, columns: int, key: int
) -> tuple[IntArray, NDArray[np.float32]]:
    """Return the trained rows [m] and their values [m, k] as the receiver gets them; raise `PayloadError`."""
    reader = Reader(data)
    if MessageHeader.read(reader, MessageKind.CODED_MATRIX).columns != columns:
        raise PayloadError(f"the payload is of another matrix than one of {columns} columns")
    bits = np.unpackbits(np.frombuffer(bytes(reader.take(-(-n_rows // 8))), dtype=np.uint8), bitorder="little")
    if bits[n_rows:].any():
        raise PayloadError("the row mask has bits beyond the last row")
    rows = np.flatnonzero(bits[:n_rows])
    matrix = codec.decode(bytes(reader.rest()), {WHOLE: (n_rows, columns)}, key)[WHOLE]
    return rows, matrix[rows]


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
class GridPayload(Payload):
    """Integers of one or several tensors, each coded with a model of its own; their shapes are known to both sides.

    They are values rounded to a public grid. A server and a client that share the grid need nothing else: a model, a
    part of it, and the change between two of its versions are all integers.

    `seed` lets the receiver regenerate a basis; None sends none.
    """

    points: Sequence[GridPoints]
    seed: int | None = None

    def wire_bits(self) -> int:
        """Return eight times the length of `to_bytes()`."""
        return 8 * len(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the header, which has the largest magnitude, the seed if there is one, and the coded integers."""
        most = max((int(np.abs(points).max()) for points in self.points if points.size), default=0)
        streams = [points.ravel().astype(np.int64) + most for points in self.points]
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
