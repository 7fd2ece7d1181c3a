"""Streams of randomness: what they depend on, how even they are, and values that must never change."""

import numpy as np
import pytest

from narrowcast.platform.seeds import generator, stream_keys, uniform_below, uniform_bits

CLIENTS = np.arange(50)
PLACES = np.arange(20)


def stream(seed: int, purpose: str, round_index: int, client: int) -> tuple[int, ...]:
    return tuple(uniform_bits(stream_keys(seed, purpose, round_index, np.array([client])), PLACES).tolist())


INPUTS = [
    (seed, purpose, round_index, client)
    for seed in (0, 1, 2**63 - 1)
    for purpose in ("negatives", "shuffle", "rank")
    for round_index in (0, 1, 2, 1000)
    for client in (0, 1, 2, 999_999)
]


def test_streams_differ_by_seed_purpose_round_and_client() -> None:
    words = [word for each in INPUTS for word in stream(*each)]
    assert len(set(words)) == len(INPUTS) * len(PLACES)
    drawn = {generator(*each).integers(2**63) for each in INPUTS}
    assert len(drawn) == len(INPUTS)


def test_swapping_seed_and_round_or_round_and_client_gives_another_stream() -> None:
    assert len({stream(a, "rank", b, c) for a, b, c in [(1, 2, 3), (2, 1, 3), (1, 3, 2), (3, 2, 1), (2, 3, 1)]}) == 5


def test_a_stream_does_not_depend_on_company() -> None:
    together = uniform_bits(stream_keys(3, "shuffle", 4, CLIENTS)[:, None], PLACES)
    assert together.shape == (50, 20)
    for client in CLIENTS:
        assert tuple(together[client].tolist()) == stream(3, "shuffle", 4, int(client))
    shuffled = np.random.default_rng(0).permutation(CLIENTS)
    assert np.array_equal(stream_keys(3, "shuffle", 4, shuffled), stream_keys(3, "shuffle", 4, CLIENTS)[shuffled])
    assert np.array_equal(uniform_bits(stream_keys(3, "shuffle", 4, CLIENTS)[:, None], PLACES[::-1]), together[:, ::-1])


def excess(counts: np.ndarray) -> float:
    """The chi-square statistic of a uniform draw, in its standard deviations above its mean."""
    expected, freedom = counts.sum() / len(counts), len(counts) - 1
    return float((((counts - expected) ** 2).sum() / expected - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("bound", [2, 3, 10, 257, 1682])
@pytest.mark.parametrize("axis", ["places", "clients", "rounds"])
def test_uniform_below_is_uniform(bound: int, axis: str) -> None:
    n = 100_000
    if axis == "rounds":
        keys = np.concatenate([stream_keys(0, "negatives", each, np.arange(100)) for each in range(n // 100)])
    else:
        keys = stream_keys(0, "negatives", 1, np.zeros(n, dtype=np.int64) if axis == "places" else np.arange(n))
    places = np.arange(n) if axis == "places" else np.zeros(n, dtype=np.int64)
    drawn = uniform_below(keys, places, np.full(n, bound))
    counts = np.bincount(drawn, minlength=bound)
    assert drawn.min() == 0
    assert len(counts) == bound
    assert abs(excess(counts)) < 5


def test_neighbouring_streams_are_independent() -> None:
    """Pairs of words of neighbouring clients, rounds and places fall evenly into 16 x 16 cells."""
    keys = [stream_keys(0, "shuffle", each, np.arange(20_000)) >> np.uint64(60) for each in (1, 2)]
    words = uniform_bits(stream_keys(0, "shuffle", 1, np.arange(20_000))[:, None], np.arange(2)) >> np.uint64(60)
    pairs = {
        "clients": (words[:-1, 0], words[1:, 0]),
        "places": (words[:, 0], words[:, 1]),
        "rounds": (keys[0], keys[1]),
    }
    for one, other in pairs.values():
        assert abs(excess(np.bincount((16 * one + other).astype(np.int64), minlength=256))) < 5


def test_uniform_below_takes_a_bound_for_each_draw() -> None:
    keys = stream_keys(0, "negatives", 1, np.arange(10_000))
    bounds = 1 + np.arange(10_000) % 7
    drawn = uniform_below(keys, np.zeros(10_000, dtype=np.int64), bounds)
    assert (drawn >= 0).all()
    assert (drawn < bounds).all()
    assert all(drawn[bounds == bound].max() == bound - 1 for bound in range(1, 8))


def test_every_bit_is_set_half_of_the_time() -> None:
    words = uniform_bits(stream_keys(0, "shuffle", 1, np.arange(1000))[:, None], np.arange(100)).ravel()
    share = [(words >> np.uint64(bit) & np.uint64(1)).mean() for bit in range(64)]
    assert np.abs(np.array(share) - 0.5).max() < 5 * 0.5 / 100_000**0.5


def test_a_stream_is_splitmix64() -> None:
    # The first five outputs for the state 1234567, as https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64.
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert uniform_bits(np.array([1234567], dtype=np.uint64), np.arange(5)).tolist() == wanted


KNOWN = {
    (0, "negatives", 1, 0): (0xB4F0B8A3ED447B82, [1188, 121, 672, 894], 5379269919789668854),
    (0, "negatives", 1, 1): (0xA1073E87EF5DDF93, [1058, 1297, 769, 665], 4490800162965852985),
    (7, "shuffle", 2, 942): (0x8778A1EDCF937DF2, [890, 204, 423, 1391], 7525485061308009992),
    (2**63 - 1, "components", 1000, 10**6): (0xF2A0AF40B52FACAC, [1594, 705, 1546, 1029], 5389872494638722124),
}


@pytest.mark.parametrize("key", KNOWN, ids=str)
def test_known_values(key: tuple[int, str, int, int]) -> None:
    """Recorded once: where these change, every result of every seed changes."""
    first_word, below_1682, first_integer = KNOWN[key]
    keys = stream_keys(*key[:3], np.array([key[3]]))
    assert stream(*key)[0] == first_word
    assert uniform_below(keys, np.arange(4), np.full(4, 1682)).tolist() == below_1682
    assert int(generator(*key).integers(2**63)) == first_integer
