"""Wire format of k indices out of n: an index list, a bitmap, or the gaps between indices."""

from __future__ import annotations

from math import log2
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.codecs.packing import pack, packed_bytes, unpack
from narrowcast.algorithms.codecs.wire import Reader
from narrowcast.algorithms.local_training.compiled import compiled, read_only
from narrowcast.platform.types import IntArray, PayloadError

IndexLayout = Annotated[
    Literal["smallest", "int32"], Field(description="layout of the indices: the shortest of three, or four bytes each")
]
"""`smallest`: one byte that selects the shortest of the three forms.

`int32`: four bytes per index, as in the code released with CoLR.
"""

_LIST, _BITMAP, _GAPS = range(3)


def write_indices(places: IntArray, count: int, layout: IndexLayout) -> bytes:
    """Return the bytes of the ascending indices `places` [k] out of 0..count-1."""
    if layout == "int32":
        return places.astype("<u4").tobytes()
    shift = _shift(len(places), count)
    unary = int(_unary_bits(read_only(places, np.int64), shift))
    forms = [
        (packed_bytes(len(places), max(count, 1)), _LIST),
        (-(-count // 8), _BITMAP),
        (-(-unary // 8) + packed_bytes(len(places), 1 << shift), _GAPS),
    ]
    _, form = min(forms)
    if form == _LIST:
        body = pack(places, max(count, 1))
    elif form == _BITMAP:
        marked = np.zeros(count, dtype=bool)
        marked[places] = True
        body = np.packbits(marked, bitorder="little").tobytes()
    else:
        body = _write_gaps(places, shift, unary)
    return bytes([form]) + body


def read_indices(reader: Reader, kept: int, count: int, layout: IndexLayout) -> IntArray:
    """Return the `kept` ascending indices out of 0..count-1 that `write_indices` wrote.

    Raise `PayloadError` if malformed.
    """
    form = _LIST if layout == "int32" else reader.take(1)[0]
    if layout == "int32":
        places = np.frombuffer(reader.take(4 * kept), dtype="<u4").astype(np.int64)
    elif form == _LIST:
        places = unpack(reader, kept, max(count, 1))
    elif form == _BITMAP:
        bits = np.unpackbits(np.frombuffer(reader.take(-(-count // 8)), dtype=np.uint8), bitorder="little")
        places = np.flatnonzero(bits)
    elif form == _GAPS:
        places = _read_gaps(reader, kept, count)
    else:
        raise PayloadError(f"the payload has indices of unknown form {form}")
    if len(places) != kept or not _ascending(read_only(places, np.int64), count):
        raise PayloadError(f"the payload must list {kept} of {count} indices, each once and in order")
    return places


def max_index_bytes(kept: int, count: int, layout: IndexLayout) -> int:
    """Return the largest number of bytes of `kept` indices."""
    return 4 * kept if layout == "int32" else 1 + min(packed_bytes(kept, max(count, 1)), -(-count // 8))


def _shift(kept: int, count: int) -> int:
    """Return Rice's parameter, known to both sides: log2 of ln(2) times the mean gap, rounded (Golomb, 1966)."""
    return max(0, round(log2(max(0.6931 * count / max(kept, 1), 1.0))))


def _write_gaps(places: IntArray, shift: int, unary: int) -> bytes:
    """Return each gap's quotient in unary (a one after that many zeros), then all remainders of `shift` bits."""
    quotients, remainders = _split_gaps(read_only(places, np.int64), shift, unary)
    return bytes(quotients) + pack(remainders, 1 << shift)


def _read_gaps(reader: Reader, kept: int, count: int) -> IntArray:
    shift = _shift(kept, count)
    longest = -(-((count >> shift) + kept) // 8)
    data = np.frombuffer(reader.peek(longest), dtype=np.uint8)
    quotients = np.empty(kept, dtype=np.int64)
    found, unary = _find_quotients(read_only(data, np.uint8), quotients)
    if found < kept:
        raise PayloadError(f"the payload has gaps to {found} of {kept} indices")
    used = reader.take(-(-unary // 8))
    if kept and used[-1] >> ((unary - 1) % 8 + 1):
        raise PayloadError("the payload has gaps to more indices than are kept")
    places: IntArray = _join_gaps(quotients, unpack(reader, kept, 1 << shift), shift)
    return places


@compiled()
def _unary_bits(places: IntArray, shift: int) -> int:
    """Return the bits of all gaps' quotients in unary."""
    before, bits = -1, 0
    for place in places:
        bits += ((place - before - 1) >> shift) + 1
        before = place
    return bits


@compiled()
def _split_gaps(places: IntArray, shift: int, unary: int) -> tuple[NDArray[np.uint8], IntArray]:
    """Return the gaps' quotients in `unary` bits, lowest bit of a byte first, and their remainders [k]."""
    quotients, remainders = np.zeros((unary + 7) // 8, dtype=np.uint8), np.empty(len(places), dtype=np.int64)
    before, bit = -1, -1
    for index, place in enumerate(places):
        gap = place - before - 1
        bit += (gap >> shift) + 1
        quotients[bit >> 3] |= np.uint8(1 << (bit & 7))
        remainders[index] = gap & ((1 << shift) - 1)
        before = place
    return quotients, remainders


@compiled()
def _find_quotients(data: NDArray[np.uint8], quotients: IntArray) -> tuple[int, int]:
    """Write the numbers of zeros before each one of the bits; return how many ones were found, and the bits read."""
    found, before = 0, -1
    for bit in range(8 * len(data)):
        if found == len(quotients):
            break
        if data[bit >> 3] >> np.uint8(bit & 7) & 1:
            quotients[found] = bit - before - 1
            found, before = found + 1, bit
    return found, before + 1


@compiled()
def _join_gaps(quotients: IntArray, remainders: IntArray, shift: int) -> IntArray:
    places = np.empty(len(quotients), dtype=np.int64)
    before = -1
    for index in range(len(quotients)):
        before += (quotients[index] << shift) + remainders[index] + 1
        places[index] = before
    return places


@compiled()
def _ascending(places: IntArray, count: int) -> bool:
    """Return whether the indices ascend and are below `count`."""
    for index in range(1, len(places)):
        if places[index] <= places[index - 1]:
            return False
    return len(places) == 0 or places[-1] < count
