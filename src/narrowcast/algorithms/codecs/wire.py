"""The wire formats that all payloads share: checked reads, the message header, packed symbols, and lists of indices.

Bytes that arrive are not trusted: every read states its length, and nothing may be left at the end.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from math import log2
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.compiled import compiled, read_only
from narrowcast.platform.types import Arrays, Dtype, IntArray, PayloadError

Count = TypeVar("Count", int, IntArray)
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
_VARINT_BYTES = 5


class Reader:
    """A reader of bytes from the front; it raises `PayloadError` if bytes are missing, left over or malformed."""

    def __init__(self, data: bytes) -> None:
        self._rest = memoryview(data)

    def take(self, size: int) -> memoryview:
        """Return the next `size` bytes and advance."""
        if size > len(self._rest):
            raise PayloadError(f"the payload ends {size - len(self._rest)} bytes early")
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def peek(self, size: int) -> memoryview:
        """Return the next bytes, at most `size`, without advancing."""
        return self._rest[:size]

    def floats(self, count: int, dtype: Dtype = FLOAT32) -> NDArray[Any]:
        """Return `count` little-endian floating-point values; raise `PayloadError` if they are not finite."""
        values = np.frombuffer(self.take(dtype.itemsize * count), dtype=dtype.newbyteorder("<")).astype(dtype)
        if not np.isfinite(values).all():
            raise PayloadError("the payload has values that are not finite")
        return values

    def varint(self, highest: int) -> int:
        """Return an integer of 0 to `highest`, stored in groups of seven bits, least significant first."""
        value = 0
        for position in range(_VARINT_BYTES):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << 7 * position
            if byte < 0x80:
                if value > highest or (position and not byte):
                    raise PayloadError(f"the payload has a count of {value} where 0 to {highest} is allowed")
                return value
        raise PayloadError("the payload has a count that does not end")

    def rest(self) -> memoryview:
        """Return all remaining bytes."""
        return self.take(len(self._rest))

    def finish(self) -> None:
        """Raise `PayloadError` if bytes are left."""
        if len(self._rest):
            raise PayloadError(f"the payload goes on for {len(self._rest)} bytes after its end")


def varint(value: int) -> bytes:
    """Return the bytes that `Reader.varint` reads."""
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def varint_bytes(value: Count) -> Count:
    """Return the length of `varint(value)`, for values below 2^35."""
    return 1 + (value >= 2**7) + (value >= 2**14) + (value >= 2**21) + (value >= 2**28)


_FORMAT = struct.Struct("<BBHI")  # kind, flags, columns, examples
HEADER_BYTES = _FORMAT.size
HEADER_BITS = 8 * HEADER_BYTES
HAS_SEED = 128
"""The flag of messages with a seed of `SEED_BYTES`, from which the receiver regenerates a basis."""
SEED_BYTES = 8
HAS_FLOAT64 = 64
"""The flag of tensors of float64, of 8 bytes each; other messages have values of float32, or decode to it."""
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
    """Kind and flags of a payload, its number of columns (0 for none, at most 65,535), and the sender's examples.

    Every message between clients and server has the same header, counted like all other bytes. It has what the receiver
    does not know before it reads on; the sender, the round and the length are those of the link.
    """

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
        sent_kind, sent_flags, columns, examples = _FORMAT.unpack(reader.take(HEADER_BYTES))
        if sent_kind != kind or sent_flags & ~flags:
            name = kind.name.lower().replace("_", " ")
            raise PayloadError(f"these bytes do not start with the header of a message of {name}")
        return cls(kind, sent_flags, columns, examples)


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


_WORD_BITS = 64


def packed_bytes(count: int, alphabet: int) -> int:
    """Return the bytes of `count` packed symbols of 0..alphabet-1, for an alphabet of up to 2^32."""
    per_group, width = _group(alphabet)
    groups, rest = divmod(count, per_group)
    return (groups * width + _bits_for(alphabet, rest) + 7) // 8


def pack(symbols: IntArray, alphabet: int) -> bytes:
    """Return the symbols [n], each of 0..alphabet-1, as `packed_bytes(n, alphabet)` bytes.

    Symbols are packed at a fixed width in base `alphabet`: as many as fit in 64 bits form one number. Fifteen symbols
    take 3.91 bits each, three take 1.586; the loss against log2(alphabet) is below 0.1 bits for an alphabet of up to 64
    and below 0.2 for any of up to 1,000 (tested).
    """
    per_group, width = _group(alphabet)
    tail = _bits_for(alphabet, len(symbols) % per_group)
    size = packed_bytes(len(symbols), alphabet)
    packed: NDArray[np.uint8] = _pack(read_only(symbols, np.int64), np.uint64(alphabet), per_group, width, tail, size)
    return packed.tobytes()


def unpack(reader: Reader, count: int, alphabet: int) -> IntArray:
    """Return the `count` symbols that `pack` packed; raise `PayloadError` if the bytes are malformed."""
    per_group, width = _group(alphabet)
    data = np.frombuffer(reader.take(packed_bytes(count, alphabet)), dtype=np.uint8)
    symbols = np.empty(count, dtype=np.int64)
    tail = _bits_for(alphabet, count % per_group)
    clean, known = _unpack(read_only(data, np.uint8), np.uint64(alphabet), per_group, width, tail, symbols)
    if not clean:
        raise PayloadError("the payload has bits after its last symbol")
    if not known:
        raise PayloadError(f"the payload has symbols outside 0 to {alphabet - 1}")
    return symbols


@lru_cache(maxsize=65536)
def _group(alphabet: int) -> tuple[int, int]:
    """Return the symbols and bits of a group: the fewest bits per symbol, and of such groups the largest."""
    bound = _WORD_BITS // max(alphabet.bit_length() - 1, 1)
    most = next(symbols for symbols in range(bound, 0, -1) if _bits_for(alphabet, symbols) <= _WORD_BITS)
    return min(
        ((symbols, _bits_for(alphabet, symbols)) for symbols in range(1, most + 1)),
        key=lambda group: (group[1] / group[0], -group[0]),
    )


@lru_cache(maxsize=65536)
def _bits_for(alphabet: int, symbols: int) -> int:
    """Return the fewest bits that hold this many symbols."""
    return int((alphabet**symbols - 1).bit_length())


@compiled()
def _pack(
    symbols: IntArray, alphabet: np.uint64, per_group: int, width: int, tail: int, size: int
) -> NDArray[np.uint8]:
    """Return groups of `per_group` symbols as numbers of `width` bits, the first symbol and the lowest bit first.

    The last group, if it has fewer symbols, takes `tail` bits.
    """
    packed = np.zeros(size, dtype=np.uint8)
    bit = 0
    for start in range(0, len(symbols), per_group):
        stop = min(start + per_group, len(symbols))
        word = np.uint64(0)
        for index in range(stop - 1, start - 1, -1):
            word = word * alphabet + np.uint64(symbols[index])
        left = width if stop - start == per_group else tail
        while left > 0:
            taken = min(8 - (bit & 7), left)
            low = word & np.uint64((1 << taken) - 1)
            packed[bit >> 3] |= np.uint8(low << np.uint64(bit & 7))
            word >>= np.uint64(taken)
            bit += taken
            left -= taken
    return packed


@compiled()
def _unpack(
    data: NDArray[np.uint8], alphabet: np.uint64, per_group: int, width: int, tail: int, symbols: IntArray
) -> tuple[bool, bool]:
    """Write the symbols of `_pack`; return whether no bit is left over, and whether every number is of symbols."""
    bit, known = 0, True
    power = alphabet & (alphabet - np.uint64(1)) == 0
    shift = np.uint64(0)
    while power and (alphabet >> shift) > 1:
        shift += np.uint64(1)
    for start in range(0, len(symbols), per_group):
        stop = min(start + per_group, len(symbols))
        left = width if stop - start == per_group else tail
        word, filled = np.uint64(0), 0
        while filled < left:
            taken = min(8 - (bit & 7), left - filled)
            low = (np.uint64(data[bit >> 3]) >> np.uint64(bit & 7)) & np.uint64((1 << taken) - 1)
            word |= low << np.uint64(filled)
            bit += taken
            filled += taken
        for index in range(start, stop):
            rest = word >> shift if power else word // alphabet
            symbols[index] = np.int64(word - rest * alphabet)
            word = rest
        known &= word == 0
    return not (bit & 7 and data[bit >> 3] >> np.uint8(bit & 7)), known


IndexLayout = Annotated[
    Literal["smallest", "int32"], Field(description="layout of the indices: the shortest of three, or four bytes each")
]
"""`smallest`: one byte that selects the shortest of the three forms.

`int32`: four bytes per index, as in the code released with CoLR.
"""

_LIST, _BITMAP, _GAPS = range(3)


def write_indices(indices: IntArray, count: int, layout: IndexLayout) -> bytes:
    """Return the bytes of the ascending indices [k] out of 0..count-1: a list, a bitmap, or the gaps between them."""
    if layout == "int32":
        return indices.astype("<u4").tobytes()
    shift = _shift(len(indices), count)
    unary = int(_unary_bits(read_only(indices, np.int64), shift))
    forms = [
        (packed_bytes(len(indices), max(count, 1)), _LIST),
        (-(-count // 8), _BITMAP),
        (-(-unary // 8) + packed_bytes(len(indices), 1 << shift), _GAPS),
    ]
    _, form = min(forms)
    if form == _LIST:
        body = pack(indices, max(count, 1))
    elif form == _BITMAP:
        marked = np.zeros(count, dtype=bool)
        marked[indices] = True
        body = np.packbits(marked, bitorder="little").tobytes()
    else:
        body = _write_gaps(indices, shift, unary)
    return bytes([form]) + body


def read_indices(reader: Reader, size: int, count: int, layout: IndexLayout) -> IntArray:
    """Return the `size` ascending indices out of 0..count-1 that `write_indices` wrote.

    Raise `PayloadError` if malformed.
    """
    form = _LIST if layout == "int32" else reader.take(1)[0]
    if layout == "int32":
        indices = np.frombuffer(reader.take(4 * size), dtype="<u4").astype(np.int64)
    elif form == _LIST:
        indices = unpack(reader, size, max(count, 1))
    elif form == _BITMAP:
        bits = np.unpackbits(np.frombuffer(reader.take(-(-count // 8)), dtype=np.uint8), bitorder="little")
        indices = np.flatnonzero(bits)
    elif form == _GAPS:
        indices = _read_gaps(reader, size, count)
    else:
        raise PayloadError(f"the payload has indices of unknown form {form}")
    if len(indices) != size or not _ascending(read_only(indices, np.int64), count):
        raise PayloadError(f"the payload must list {size} of {count} indices, each once and in order")
    return indices


def max_index_bytes(size: int, count: int, layout: IndexLayout) -> int:
    """Return the largest number of bytes of `size` indices."""
    return 4 * size if layout == "int32" else 1 + min(packed_bytes(size, max(count, 1)), -(-count // 8))


def _shift(size: int, count: int) -> int:
    """Return Rice's parameter, known to both sides: log2 of ln(2) times the mean gap, rounded (Golomb, 1966)."""
    return max(0, round(log2(max(0.6931 * count / max(size, 1), 1.0))))


def _write_gaps(indices: IntArray, shift: int, unary: int) -> bytes:
    """Return each gap's quotient in unary (a one after that many zeros), then all remainders of `shift` bits."""
    quotients, remainders = _split_gaps(read_only(indices, np.int64), shift, unary)
    return bytes(quotients) + pack(remainders, 1 << shift)


def _read_gaps(reader: Reader, size: int, count: int) -> IntArray:
    shift = _shift(size, count)
    longest = -(-((count >> shift) + size) // 8)
    data = np.frombuffer(reader.peek(longest), dtype=np.uint8)
    quotients = np.empty(size, dtype=np.int64)
    n_read, unary = _find_quotients(read_only(data, np.uint8), quotients)
    if n_read < size:
        raise PayloadError(f"the payload has gaps to {n_read} of {size} indices")
    used = reader.take(-(-unary // 8))
    if size and used[-1] >> ((unary - 1) % 8 + 1):
        raise PayloadError("the payload has gaps to more indices than are kept")
    indices: IntArray = _join_gaps(quotients, unpack(reader, size, 1 << shift), shift)
    return indices


@compiled()
def _unary_bits(indices: IntArray, shift: int) -> int:
    """Return the bits of all gaps' quotients in unary."""
    before, bits = -1, 0
    for index in indices:
        bits += ((index - before - 1) >> shift) + 1
        before = index
    return bits


@compiled()
def _split_gaps(indices: IntArray, shift: int, unary: int) -> tuple[NDArray[np.uint8], IntArray]:
    """Return the gaps' quotients in `unary` bits, lowest bit of a byte first, and their remainders [k]."""
    quotients, remainders = np.zeros((unary + 7) // 8, dtype=np.uint8), np.empty(len(indices), dtype=np.int64)
    before, bit = -1, -1
    for index, selected in enumerate(indices):
        gap = selected - before - 1
        bit += (gap >> shift) + 1
        quotients[bit >> 3] |= np.uint8(1 << (bit & 7))
        remainders[index] = gap & ((1 << shift) - 1)
        before = selected
    return quotients, remainders


@compiled()
def _find_quotients(data: NDArray[np.uint8], quotients: IntArray) -> tuple[int, int]:
    """Write the number of zeros before each set bit; return how many bits were set, and the bits read."""
    n_read, before = 0, -1
    for bit in range(8 * len(data)):
        if n_read == len(quotients):
            break
        if data[bit >> 3] >> np.uint8(bit & 7) & 1:
            quotients[n_read] = bit - before - 1
            n_read, before = n_read + 1, bit
    return n_read, before + 1


@compiled()
def _join_gaps(quotients: IntArray, remainders: IntArray, shift: int) -> IntArray:
    indices = np.empty(len(quotients), dtype=np.int64)
    before = -1
    for index in range(len(quotients)):
        before += (quotients[index] << shift) + remainders[index] + 1
        indices[index] = before
    return indices


@compiled()
def _ascending(indices: IntArray, count: int) -> bool:
    """Return whether the indices ascend and are below `count`."""
    for index in range(1, len(indices)):
        if indices[index] <= indices[index - 1]:
            return False
    return len(indices) == 0 or indices[-1] < count
