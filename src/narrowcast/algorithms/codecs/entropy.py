"""Entropy coding of symbols: the coder, by asymmetric numeral systems, and the codec stage `entropy`.

The coder (Duda, arXiv:1311.2540) is a stack of symbols in 32-bit words and a state of 64 bits: symbols are pushed in
reverse and popped in order. A stream's model is its `bounds` [n + 1]: symbol i has the part of 2^24 from `bounds[i]` to
`bounds[i + 1]`, which is never empty. The words are those of the library `constriction` for categorical models made in
its fast way (tested).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.chain import SymbolStage
from narrowcast.algorithms.codecs.wire import Reader, pack, packed_bytes, unpack, varint
from narrowcast.platform.compiled import compiled, read_only
from narrowcast.platform.types import FloatArray, IntArray, PayloadError

_PRECISION = 24
_TABLE_BITS = 12  # a table of 4,096 entries pays off for streams of about as many symbols
_LONG_STREAM = 1024
_WHOLE = np.uint64(1 << _PRECISION)
_24, _32, _40 = np.uint64(_PRECISION), np.uint64(32), np.uint64(64 - _PRECISION)

Symbols32 = NDArray[np.uint32]


class AnsEncoder:
    """A coder onto which streams of symbols are pushed, the last stream first."""

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
    """A coder from which the streams that `AnsEncoder` pushed are popped, the first stream first."""

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
    for probability in share:
        total += probability
    scale = np.float64((1 << _PRECISION) - len(share)) / total
    bounds = np.empty(len(share) + 1, dtype=np.int64)
    below = 0.0
    for symbol, probability in enumerate(share):
        bounds[symbol] = np.int64(below * scale) + symbol
        below += probability
    bounds[-1] = 1 << _PRECISION
    return bounds


@compiled()
def _push(symbols: IntArray, low: int, bounds: IntArray, state: np.uint64) -> tuple[Symbols32, np.uint64]:
    """Return the words that leave the state while symbols are pushed, and the state after them."""
    words = np.empty(len(symbols), dtype=np.uint32)
    used = 0
    for index in range(len(symbols) - 1, -1, -1):
        symbol = symbols[index] - low
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
    for index in range(len(symbols)):
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
        symbols[index] = first + low
    return used, state


_PACKED, _TABLE, _KNOTS = range(3)
_CODES = 256
_PER_BIT = 8
_MOST_TABLE = 256
# A code c stands for the weight 2^(40 - c/8), computed by shifts from one octave, so that both sides agree bit for bit.
_OCTAVE = np.array([round(2 ** (40 - part / _PER_BIT)) for part in range(_PER_BIT)], dtype=np.int64)
_WEIGHTS = _OCTAVE[np.arange(_CODES) % _PER_BIT] >> (np.arange(_CODES) // _PER_BIT)


@dataclass(frozen=True)
class _SymbolModel:
    """Model of one stream: its description on the wire, and the codes of the symbols low..low + len - 1."""

    form: int
    low: int
    codes: IntArray
    described: bytes

    def bounds(self) -> IntArray:
        bounds: IntArray = bounds_of(read_only(_WEIGHTS[self.codes], np.int64))
        return bounds


class Entropy(SymbolStage):
    """Code symbols near their empirical entropy; the model's description and the coded length are sent and counted.

    Each tensor's symbols have a model of their own: one byte for each symbol of the used range, or for each knot of a
    curve over it, or none if the symbols are packed instead. A message is at most one byte per tensor longer than the
    packed symbols, which is the bound that `max_bits` reports.
    """

    kind: Literal["entropy"] = "entropy"

    def write_symbols(self, streams: Sequence[IntArray], alphabet: int) -> bytes:
        """Return descriptions, packed streams and, if any stream is coded, the coder's length and words."""
        models = [_choose(symbols, alphabet) for symbols in streams]
        coded = _with_models(streams, models, alphabet)
        if len(coded) <= self.max_symbol_bytes([len(symbols) for symbols in streams], alphabet):
            return coded
        return _with_models(streams, [_packed() for _ in streams], alphabet)

    def read_symbols(self, reader: Reader, counts: Sequence[int], alphabet: int) -> list[IntArray]:
        """Return the streams: read descriptions and packed streams, then decode the others."""
        models: list[_SymbolModel] = []
        streams: list[IntArray] = []
        for count in counts:
            model = _read_model(reader, alphabet)
            models.append(model)
            streams.append(
                unpack(reader, count, alphabet) if model.form == _PACKED else np.full(count, model.low, dtype=np.int64)
            )
        if any(len(model.codes) > 1 for model in models):
            coder = _read_coder(reader, sum(packed_bytes(count, alphabet) for count in counts))
            for index, (count, model) in enumerate(zip(counts, models, strict=True)):
                if len(model.codes) > 1 and count:
                    streams[index] = coder.pop(count, model.low, model.bounds())
            if not coder.is_empty():
                raise PayloadError("the payload has more coded symbols than the tensors have values")
        return streams

    def max_symbol_bytes(self, counts: Sequence[int], alphabet: int) -> int:
        """Return one byte more than packed, for each tensor."""
        return sum(1 + packed_bytes(count, alphabet) for count in counts)


def _with_models(streams: Sequence[IntArray], models: Sequence[_SymbolModel], alphabet: int) -> bytes:
    parts = []
    for symbols, model in zip(streams, models, strict=True):
        parts.append(model.described)
        if model.form == _PACKED:
            parts.append(pack(symbols, alphabet))
    if any(len(model.codes) > 1 for model in models):
        coder = AnsEncoder()
        for symbols, model in zip(reversed(streams), reversed(models), strict=True):
            if len(model.codes) > 1:
                coder.push(symbols, model.low, model.bounds())
        words = coder.to_bytes()
        parts += [varint(len(words)), words]
    return b"".join(parts)


def _read_coder(reader: Reader, longest: int) -> AnsDecoder:
    """Return a coder over the words that follow, whose stated length is at most that of the packed symbols."""
    data = bytes(reader.take(reader.varint(longest + 8)))
    if data.endswith(b"\0"):
        raise PayloadError("the payload's coded symbols end in zeros")
    return AnsDecoder(data)


def _packed() -> _SymbolModel:
    return _SymbolModel(_PACKED, 0, np.empty(0, dtype=np.int64), bytes([_PACKED]))


def _choose(symbols: IntArray, alphabet: int) -> _SymbolModel:
    """Return the model with the fewest expected bits for this stream, its description included."""
    if not len(symbols):
        return _packed()
    low, counts = _count(read_only(symbols, np.int64), alphabet)
    best, lightest = _packed(), 8.0 * (1 + packed_bytes(len(symbols), alphabet))
    for model in _candidates(counts, low, alphabet):
        bits = 8.0 * len(model.described)
        if len(model.codes) > 1:
            bits += _coded_bits(counts, model.codes) + 32
        if bits < lightest:
            best, lightest = model, bits
    return best


@compiled()
def _count(symbols: IntArray, alphabet: int) -> tuple[int, IntArray]:
    """Return the lowest symbol, and the number of each symbol from there to the highest."""
    counts = np.zeros(alphabet, dtype=np.int64)
    low, high = alphabet, 0
    for symbol in symbols:
        if symbol < 0 or symbol >= alphabet:
            raise ValueError("a symbol is outside the alphabet")
        counts[symbol] += 1
        low, high = min(low, symbol), max(high, symbol)
    return low, counts[low : high + 1].copy()


def _candidates(counts: IntArray, low: int, alphabet: int) -> list[_SymbolModel]:
    span = varint(low) + varint(len(counts) - 1)
    knots = _knots(low, len(counts), alphabet)
    models = []
    if len(counts) <= _MOST_TABLE:
        codes = _to_codes(counts.astype(np.float64))
        sent = codes.astype(np.uint8).tobytes() if len(codes) > 1 else b""
        models.append(_SymbolModel(_TABLE, low, codes, bytes([_TABLE]) + span + sent))
    if len(knots) < len(counts):
        codes = _to_codes(_means(counts, knots))
        described = bytes([_KNOTS]) + span + codes.astype(np.uint8).tobytes()
        models.append(_SymbolModel(_KNOTS, low, _between(knots, codes, len(counts)), described))
    return models


@compiled()
def _to_codes(weights: FloatArray) -> IntArray:
    """Return -log2 of the weights over the largest, in eighths of a bit; absent symbols get the last code."""
    codes, largest = np.empty(len(weights), dtype=np.int64), weights.max()
    for index, weight in enumerate(weights):
        share = max(weight / largest, 2.0**-40)
        codes[index] = min(int(np.rint(-_PER_BIT * np.log2(share))), _CODES - 1)
    return codes


@compiled()
def _coded_bits(counts: IntArray, codes: IntArray) -> float:
    """Return the bits of `counts` symbols coded with their codes."""
    weights = _WEIGHTS[codes].astype(np.float64)
    bits = counts.sum() * np.log2(weights.sum())
    for index, count in enumerate(counts):
        if count:
            bits -= count * np.log2(weights[index])
    return float(bits)


@compiled()
def _means(counts: IntArray, knots: IntArray) -> FloatArray:
    """Return the mean count of the symbols nearest to each knot."""
    means = np.empty(len(knots))
    start = 0
    for index in range(len(knots)):
        stop = (knots[index] + knots[index + 1] + 1) // 2 if index + 1 < len(knots) else len(counts)
        means[index] = (counts[start:stop].sum() + 0.5) / (stop - start)
        start = stop
    return means


@compiled()
def _between(knots: IntArray, codes: IntArray, count: int) -> IntArray:
    """Return the codes of all symbols, interpolated linearly between the knots in integers."""
    between = np.empty(count, dtype=np.int64)
    between[0] = codes[0]
    for index in range(1, len(knots)):
        start, width, rise = knots[index - 1], knots[index] - knots[index - 1], codes[index] - codes[index - 1]
        for step in range(1, width + 1):
            between[start + step] = codes[index - 1] + rise * step // width
    return between


@lru_cache(maxsize=1024)
def _coded_symbols(alphabet: int) -> IntArray:
    """Return the symbols whose codes are sent: 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, ... from the middle to both sides."""
    distances, step = [0, 1, 2, 3], 4
    while step <= alphabet:
        distances += [step, step + step // 2]
        step *= 2
    far = np.array(distances)
    return np.unique(np.concatenate([alphabet // 2 + far, (alphabet - 1) // 2 - far]))


def _knots(low: int, count: int, alphabet: int) -> IntArray:
    """Return the positions, from `low`, of the symbols whose codes are sent: both ends, denser near the middle."""
    knots: IntArray = _knots_among(_coded_symbols(alphabet), low, count)
    return knots


@compiled()
def _knots_among(present: IntArray, low: int, count: int) -> IntArray:
    first, last = int(np.searchsorted(present, low + 1)), int(np.searchsorted(present, low + count - 1))
    inner = max(last - first, 0)
    knots = np.zeros(inner + min(count, 2), dtype=np.int64)
    for index in range(inner):
        knots[index + 1] = present[first + index] - low
    knots[-1] = count - 1
    return knots


def _read_model(reader: Reader, alphabet: int) -> _SymbolModel:
    form = reader.take(1)[0]
    if form == _PACKED:
        return _packed()
    if form > _KNOTS:
        raise PayloadError(f"the payload has symbols of unknown form {form}")
    low = reader.varint(alphabet - 1)
    count = reader.varint(alphabet - 1 - low) + 1
    knots = _knots(low, count, alphabet) if form == _KNOTS else np.arange(min(count, _MOST_TABLE))
    if form == _TABLE and count > _MOST_TABLE:
        raise PayloadError(f"the payload has a table of {count} symbols, at most {_MOST_TABLE} are allowed")
    if count == 1:
        return _SymbolModel(form, low, np.zeros(1, dtype=np.int64), b"")
    codes = np.frombuffer(reader.take(len(knots)), dtype=np.uint8).astype(np.int64)
    return _SymbolModel(form, low, _between(knots, codes, count), b"")
