"""The stack of symbols against the library `constriction`: the same words, and the symbols that were pushed."""

from __future__ import annotations

import constriction
import numpy as np
import pytest

from narrowcast.algorithms.codecs.entropy import AnsDecoder, AnsEncoder, bounds_of

Stream = tuple[np.ndarray, int, np.ndarray]


def random_streams(random: np.random.Generator, case: int) -> list[Stream]:
    """Symbols, the lowest one and weights of up to three streams: short and long, of few and many symbols."""
    streams = []
    for _ in range(random.integers(1, 4)):
        alphabet = int(random.integers(2, 3000 if case % 5 == 0 else 100))
        weights = 2 ** random.integers(0, 41, size=alphabet)
        length = int(random.integers(0, 5000 if case % 4 == 0 else 200))
        share = weights / weights.sum() if case % 2 else None
        low = int(random.integers(0, 5))
        streams.append((random.choice(alphabet, size=length, p=share) + low, low, weights))
    return streams


@pytest.mark.parametrize("case", range(40))
def test_words_are_those_of_constriction_and_symbols_come_back(case: int) -> None:
    streams = random_streams(np.random.default_rng(case), case)
    encoder, reference = AnsEncoder(), constriction.stream.stack.AnsCoder()
    for symbols, low, weights in reversed(streams):
        encoder.push(symbols, low, bounds_of(weights))
        model = constriction.stream.model.Categorical(weights / weights.sum(), perfect=False, lazy=False)
        reference.encode_reverse((symbols - low).astype(np.int32), model)
    assert encoder.to_bytes() == reference.get_compressed().astype("<u4").tobytes().rstrip(b"\0")
    decoder = AnsDecoder(encoder.to_bytes())
    for symbols, low, weights in streams:
        assert np.array_equal(decoder.pop(len(symbols), low, bounds_of(weights)), symbols)
    assert decoder.is_empty()


@pytest.mark.parametrize("case", range(10))
def test_any_bytes_decode_as_constriction_decodes_them(case: int) -> None:
    random = np.random.default_rng(case)
    data = random.bytes(4 * int(random.integers(0, 20))) + b"\1"
    weights = random.integers(1, 1000, size=int(random.integers(2, 50)))
    words = np.frombuffer(data + bytes(-len(data) % 4), dtype="<u4").astype(np.uint32)
    reference = constriction.stream.stack.AnsCoder(words)
    model = constriction.stream.model.Categorical(weights / weights.sum(), perfect=False, lazy=False)
    decoder = AnsDecoder(data)
    for count in (3, 40, 2000):
        assert np.array_equal(decoder.pop(count, 0, bounds_of(weights)), reference.decode(model, count))
        assert decoder.is_empty() == reference.is_empty()


@pytest.mark.parametrize("alphabet", [2, 65537])
def test_every_symbol_has_a_part(alphabet: int) -> None:
    weights = np.ones(alphabet, dtype=np.int64)
    weights[0] = 2**40
    bounds = bounds_of(weights)
    assert (np.diff(bounds) >= 1).all()
    assert (bounds[0], bounds[-1]) == (0, 2**24)
