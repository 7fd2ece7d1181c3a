"""Symbols as bytes: packing in a base, entropy coding, and what a model of the symbols costs."""

from __future__ import annotations

from math import log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chains import Array, codec, quantise, shapes_of
from narrowcast.algorithms.codecs.entropy import Entropy
from narrowcast.algorithms.codecs.wire import Reader, pack, packed_bytes, unpack, varint
from narrowcast.platform.types import PayloadError

always_the_same = settings(derandomize=True, max_examples=300, deadline=None, database=None)


def one_number(symbols: Array, alphabet: int) -> int:
    """The slow reference: symbols as the digits of one number, least significant first."""
    return sum(int(symbol) * alphabet**place for place, symbol in enumerate(symbols))


@always_the_same
@given(st.integers(1, 2**32), st.integers(0, 70), st.integers(0, 2**32))
def test_packed_symbols_come_back(alphabet: int, count: int, seed: int) -> None:
    symbols = np.random.default_rng(seed).integers(0, alphabet, count)
    data = pack(symbols, alphabet)
    assert len(data) == packed_bytes(count, alphabet)
    reader = Reader(data)
    assert np.array_equal(unpack(reader, count, alphabet), symbols)
    reader.finish()
    # a group is one number in base `alphabet`, and few symbols are but one group
    if alphabet**count <= 2**32:
        assert int.from_bytes(data, "little") == one_number(symbols, alphabet)


@pytest.mark.parametrize(
    ("alphabet", "bits"), [(2, 1), (3, 46 / 29), (15, 43 / 11), (255, 8), (256, 8), (257, 57 / 7), (65537, 49 / 3)]
)
def test_bits_of_a_symbol(alphabet: int, bits: float) -> None:
    assert 8 * packed_bytes(10**6, alphabet) / 10**6 == pytest.approx(bits, abs=1e-4)


def test_packing_is_near_the_logarithm_and_never_falls_with_more_symbols() -> None:
    weights = [8 * packed_bytes(10**5, alphabet) / 10**5 for alphabet in range(2, 1001)]
    losses = [weight - log2(alphabet) for alphabet, weight in enumerate(weights, start=2)]
    assert min(losses) > -1e-3
    assert max(losses[:63]) < 0.1
    assert max(losses) < 0.2
    for many in (1, 7, 100, 10**5):
        sizes = [packed_bytes(many, alphabet) for alphabet in range(1, 1000)]
        assert sizes == sorted(sizes)


@pytest.mark.parametrize("alphabet", [3, 15, 100])
def test_symbols_beyond_the_alphabet_are_refused(alphabet: int) -> None:
    with pytest.raises(PayloadError, match=r"symbols outside|bits after"):
        unpack(Reader(b"\xff" * packed_bytes(50, alphabet)), 50, alphabet)


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**14, 2**31])
def test_counts_come_back_in_the_fewest_bytes(value: int) -> None:
    assert Reader(varint(value)).varint(value) == value
    with pytest.raises(PayloadError, match=f"count of {value} where 0 to"):
        Reader(varint(value + 1)[:0] + varint(value)).varint(value - 1)


@pytest.mark.parametrize("data", [b"\x80\x00", b"\xff\xff\xff\xff\xff\x01", b"\x80", b""])
def test_malformed_counts_are_refused(data: bytes) -> None:
    with pytest.raises(PayloadError):
        Reader(data).varint(2**40)


def streams(seed: int) -> list[Array]:
    random = np.random.default_rng(seed)
    normal = np.clip(np.rint(random.standard_normal(6000) * 1.5), -7, 7).astype(np.int64) + 7
    return [normal, np.full(40, 14), random.integers(0, 15, 500), np.empty(0, dtype=np.int64), np.array([3])]


@pytest.mark.parametrize("places", [[0], [1], [2], [3], [4], [0, 1, 2, 3, 4], [4, 3, 2, 1, 0]])
def test_coded_streams_come_back(places: list[int]) -> None:
    symbols = [streams(0)[place] for place in places]
    data = Entropy().write_symbols(symbols, 15)
    assert len(data) <= Entropy().max_symbol_bytes([len(each) for each in symbols], 15)
    reader = Reader(data)
    back = Entropy().read_symbols(reader, [len(each) for each in symbols], 15)
    reader.finish()
    assert all(np.array_equal(given, got) for given, got in zip(symbols, back, strict=True))


def test_streams_of_every_length_and_skew_come_back() -> None:
    random = np.random.default_rng(0)
    coded = 0
    for count in range(1, 500, 2):
        alphabet = int(random.integers(2, 600))
        symbols = [random.choice(alphabet, count, p=random.dirichlet(np.full(alphabet, 0.01))) for _ in range(2)]
        data = Entropy().write_symbols(symbols, alphabet)
        coded += len(data) < Entropy().max_symbol_bytes([count, count], alphabet)
        reader = Reader(data)
        back = Entropy().read_symbols(reader, [count, count], alphabet)
        reader.finish()
        assert all(np.array_equal(given, got) for given, got in zip(symbols, back, strict=True))
    assert coded > 150


def entropy_bits(symbols: Array) -> float:
    share = np.unique(symbols, return_counts=True)[1] / len(symbols)
    return float(-len(symbols) * (share @ np.log2(share)))


@pytest.mark.parametrize(("deviation", "alphabet"), [(0.2, 3), (0.5, 15), (1.5, 15), (20.0, 255), (40.0, 511)])
def test_coding_is_within_a_percent_or_two_of_the_entropy_model_included(deviation: float, alphabet: int) -> None:
    middle = alphabet // 2
    values = np.random.default_rng(1).standard_normal(20_000) * deviation
    symbols = np.clip(np.rint(values), -middle, middle).astype(np.int64) + middle
    bits = 8 * len(Entropy().write_symbols([symbols], alphabet))
    # 4 bytes of length and end, 15 or fewer of a small table or some 20 knots
    assert entropy_bits(symbols) * 0.999 < bits < entropy_bits(symbols) * 1.005 + 8 * 40


def test_even_symbols_are_packed_and_cost_a_byte_more() -> None:
    symbols = np.random.default_rng(0).integers(0, 16, 4000)
    assert len(Entropy().write_symbols([symbols], 16)) <= 1 + packed_bytes(4000, 16)


def test_one_symbol_alone_costs_a_few_bytes() -> None:
    assert len(Entropy().write_symbols([np.full(10**6, 7)], 15)) <= 4


def test_many_levels_are_described_by_knots_and_not_by_a_table() -> None:
    tensors = {"Q": np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)}
    chain = codec(quantise(levels=2000, scale="max"), "entropy")
    bits = chain.encode(tensors, 0).wire_bits()
    assert bits < codec(quantise(levels=2000, scale="max")).encode(tensors, 0).wire_bits() - 0.75 * tensors["Q"].size
    back = chain.decode(chain.encode(tensors, 0).to_bytes(), shapes_of(tensors), 0)["Q"]
    assert np.abs(back - tensors["Q"]).max() <= np.abs(tensors["Q"]).max() / 2000


def test_more_coded_symbols_than_values_are_refused() -> None:
    symbols = streams(0)[0]
    data = Entropy().write_symbols([symbols], 15)
    with pytest.raises(PayloadError, match="more coded symbols"):
        Entropy().read_symbols(Reader(data), [len(symbols) - 100], 15)
