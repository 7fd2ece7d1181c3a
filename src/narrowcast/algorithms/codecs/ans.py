"""Asymmetric numeral systems (Duda, arXiv:1311.2540): a stack of symbols in 32-bit words and a state of 64 bits.

Symbols are pushed in reverse and popped in order. A stream's model is its `bounds` [n + 1]: symbol i has the part of
2^24 from `bounds[i]` to `bounds[i + 1]`, which is never empty. The words are those of the library `constriction` for
categorical models made in its fast way (tested).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.local_training.compiled import compiled, read_only
from narrowcast.platform.types import IntArray

_PRECISION = 24
_TABLE_BITS = 12  # a table of 4,096 places pays off for streams of about as many symbols
_LONG_STREAM = 1024
_WHOLE = np.uint64(1 << _PRECISION)
_24, _32, _40 = np.uint64(_PRECISION), np.uint64(32), np.uint64(64 - _PRECISION)

Symbols32 = NDArray[np.uint32]


class AnsEncoder:
    """Pushes streams of symbols, the last stream first."""

    def __init__(self) -> None:
        self._state = 0
        self._chunks: list[Symbols32] = []

    def push(self, symbols: IntArray, low: int, bounds: IntArray) -> None:
        """Push the symbols `low`..`low` + n - 1 of one stream, the last symbol first."""
        words, state = _push(read_only(symbols, np.int64), low, bounds, np.uint64(self._state))
        self._chunks.append(words)
        self._state = int(state)

    def to_bytes(self) -> bytes:
        """Return the words, little-endian, without the zeros at the end."""
        words = b"".join(chunk.astype("<u4").tobytes() for chunk in self._chunks)
        return (words + self._state.to_bytes(8, "little")).rstrip(b"\0")


class AnsDecoder:
    """Pops the streams of the bytes that `AnsEncoder.to_bytes` returned, the first stream first."""

    def __init__(self, data: bytes) -> None:
        words = np.frombuffer(data + bytes(-len(data) % 4), dtype="<u4").astype(np.uint32)
        self._used = max(len(words) - 2, 0)
        self._state = int.from_bytes(words[self._used :].astype("<u4").tobytes(), "little")
        self._words = words[: self._used]

    def pop(self, count: int, low: int, bounds: IntArray) -> IntArray:
        """Return `count` symbols of one stream; any bytes are symbols of some stream."""
        symbols = np.empty(count, dtype=np.int64)
        self._used, state = _pop(symbols, low, bounds, self._words, self._used, np.uint64(self._state))
        self._state = int(state)
        return symbols

    def is_empty(self) -> bool:
        """Return whether nothing is left, as after popping what was pushed."""
        return not self._used and not self._state


@compiled()
def bounds_of(weights: IntArray) -> IntArray:
    """Return the bounds of symbols with these weights [n], all positive: each has 1 and its share of the rest."""
    share, total = weights / weights.sum(), 0.0
    for each in share:
        total += each
    scale = np.float64((1 << _PRECISION) - len(share)) / total
    bounds = np.empty(len(share) + 1, dtype=np.int64)
    below = 0.0
    for symbol, each in enumerate(share):
        bounds[symbol] = np.int64(below * scale) + symbol
        below += each
    bounds[-1] = 1 << _PRECISION
    return bounds


@compiled()
def _push(symbols: IntArray, low: int, bounds: IntArray, state: np.uint64) -> tuple[Symbols32, np.uint64]:
    """Return the words that leave the state while symbols are pushed, and the state after them."""
    words = np.empty(len(symbols), dtype=np.uint32)
    used = 0
    for place in range(len(symbols) - 1, -1, -1):
        symbol = symbols[place] - low
        start = np.uint64(bounds[symbol])
        width = np.uint64(bounds[symbol + 1]) - start
        if (state >> _40) >= width:
            words[used] = np.uint32(state & np.uint64(0xFFFFFFFF))
            used += 1
            state >>= _32
        quotient = state // width
        state = (quotient << _24) | (start + (state - quotient * width))
    return words[:used].copy(), state


@compiled()
def _pop(
    symbols: IntArray, low: int, bounds: IntArray, words: Symbols32, used: int, state: np.uint64
) -> tuple[int, np.uint64]:
    """Write the popped symbols; return the number of words left, and the state."""
    shift = _24 - np.uint64(_TABLE_BITS if len(symbols) >= _LONG_STREAM else 0)
    table = np.empty((1 << _PRECISION >> shift) + 1, dtype=np.int32)  # the first and last symbol of each part
    symbol = 0
    for part in range(len(table) - 1):
        while bounds[symbol + 1] <= part << shift:
            symbol += 1
        table[part] = symbol
    table[-1] = len(bounds) - 2
    for place in range(len(symbols)):
        quantile = state & (_WHOLE - np.uint64(1))
        first, last = table[quantile >> shift], table[(quantile >> shift) + np.uint64(1)]
        while first < last:
            middle = (first + last) >> 1
            if bounds[middle + 1] <= np.int64(quantile):
                first = middle + 1
            else:
                last = middle
        start = np.uint64(bounds[first])
        state = (state >> _24) * (np.uint64(bounds[first + 1]) - start) + (quantile - start)
        if used and not state >> _32:
            used -= 1
            state = (state << _32) | np.uint64(words[used])
        symbols[place] = first + low
    return used, state
