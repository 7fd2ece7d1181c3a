"""Wire format of k indices out of n: an index list, a bitmap, or the gaps between indices."""

from __future__ import annotations

from typing import Literal

import numpy as np

from narrowcast.algorithms.codecs.packing import pack, packed_bytes, unpack
from narrowcast.algorithms.codecs.wire import Reader
from narrowcast.platform.types import IntArray, PayloadError

IndexLayout = Literal["smallest", "int32"]
"""`smallest`: one byte that selects the shortest of the three forms.

`int32`: four bytes per index, as in the code released with CoLR.
"""

_LIST, _BITMAP, _GAPS = range(3)


def write_indices(places: IntArray, count: int, layout: IndexLayout) -> bytes:
    """Return the bytes of the ascending indices `places` [k] out of 0..count-1."""
    if layout == "int32":
        return places.astype("<u4").tobytes()
    forms = [
        (packed_bytes(len(places), max(count, 1)), _LIST),
        (-(-count // 8), _BITMAP),
        (_gap_bytes(places, _shift(len(places), count)), _GAPS),
    ]
    _, form = min(forms)
    if form == _LIST:
        body = pack(places, max(count, 1))
    elif form == _BITMAP:
        marked = np.zeros(count, dtype=bool)
        marked[places] = True
        body = np.packbits(marked, bitorder="little").tobytes()
    else:
        body = _write_gaps(places, _shift(len(places), count))
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
    if len(places) != kept or (kept and (places[-1] >= count or (np.diff(places) <= 0).any())):
        raise PayloadError(f"the payload must list {kept} of {count} indices, each once and in order")
    return places


def max_index_bytes(kept: int, count: int, layout: IndexLayout) -> int:
    """Return the largest number of bytes of `kept` indices."""
    return 4 * kept if layout == "int32" else 1 + min(packed_bytes(kept, max(count, 1)), -(-count // 8))


def _shift(kept: int, count: int) -> int:
    """Return Rice's parameter, known to both sides: log2 of ln(2) times the mean gap, rounded (Golomb, 1966)."""
    return max(0, round(np.log2(max(0.6931 * count / max(kept, 1), 1.0))))


def _gaps(places: IntArray) -> IntArray:
    return np.diff(places, prepend=-1) - 1


def _gap_bytes(places: IntArray, shift: int) -> int:
    unary = int((_gaps(places) >> shift).sum()) + len(places)
    return -(-unary // 8) + packed_bytes(len(places), 1 << shift)


def _write_gaps(places: IntArray, shift: int) -> bytes:
    """Return each gap's quotient in unary (a one after that many zeros), then all remainders of `shift` bits."""
    gaps = _gaps(places)
    ones = np.cumsum((gaps >> shift) + 1) - 1
    unary = np.zeros(int(ones[-1]) + 1 if len(ones) else 0, dtype=bool)
    unary[ones] = True
    return np.packbits(unary, bitorder="little").tobytes() + pack(gaps & ((1 << shift) - 1), 1 << shift)


def _read_gaps(reader: Reader, kept: int, count: int) -> IntArray:
    shift = _shift(kept, count)
    longest = -(-((count >> shift) + kept) // 8)
    bits = np.unpackbits(np.frombuffer(reader.peek(longest), dtype=np.uint8), bitorder="little")
    ones = np.flatnonzero(bits)[:kept]
    if len(ones) < kept:
        raise PayloadError(f"the payload has gaps to {len(ones)} of {kept} indices")
    unary = int(ones[-1]) + 1 if kept else 0
    used = reader.take(-(-unary // 8))
    if kept and used[-1] >> ((unary - 1) % 8 + 1):
        raise PayloadError("the payload has gaps to more indices than are kept")
    quotients = np.diff(ones, prepend=-1) - 1
    return np.cumsum((quotients << shift) + unpack(reader, kept, 1 << shift) + 1) - 1
