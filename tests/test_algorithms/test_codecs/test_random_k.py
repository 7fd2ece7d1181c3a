"""Random sparsification against its definition, and EDEN and quantisers after it against their papers' errors."""

from __future__ import annotations

from math import ceil, pi, sqrt
from typing import Any

import numpy as np
import pytest

from chains import Array, codec, error, quantise, round_trip
from narrowcast.algorithms.codecs.chain import stream
from narrowcast.platform.seeds import uniform_bits


def vectors(size: int) -> dict[str, Array]:
    random = np.random.default_rng(0)
    found = {
        "normal": random.standard_normal(size),
        "heavy": random.standard_t(2, size),
        "even": np.ones(size),
        "one": np.arange(size) == 3,
    }
    return {name: values.astype(np.float32) for name, values in found.items()}


def random_k(fraction: float, **fields: Any) -> dict[str, Any]:
    return {"kind": "random_k", "fraction": fraction, **fields}


@pytest.mark.parametrize("fraction", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("scale", ["unbiased", "kept"])
def test_the_kept_values_are_those_with_the_least_words(fraction: float, scale: str) -> None:
    """The slow reference: sort all places by the words of the key's stream, and keep the first."""
    tensors, key = {"a": vectors(60)["normal"].reshape(12, 5), "b": vectors(17)["heavy"]}, 9
    flat = np.concatenate([tensors["a"].ravel(), tensors["b"]])
    words = [int(uniform_bits(stream(key, "places"), np.array([place]))[0]) for place in range(77)]
    kept = sorted(range(77), key=words.__getitem__)[: ceil(fraction * 77)]
    expected = np.zeros(77, dtype=np.float32)
    expected[kept] = flat[kept] * np.float32(77 / len(kept) if scale == "unbiased" else 1)
    chain = codec(random_k(fraction, scale=scale))
    back = round_trip(chain, tensors, key)
    assert np.array_equal(np.concatenate([back["a"].ravel(), back["b"]]), expected)
    assert chain.encode(tensors, key).wire_bits() == 32 * len(kept)  # no index is sent
    assert fraction < 1 or scale == "kept" or np.array_equal(back["a"], tensors["a"])


def test_every_place_is_kept_equally_often() -> None:
    keys, share = 2000, 0.25
    kept = np.array([round_trip(codec(random_k(share)), {"x": np.ones(40)}, key)["x"] > 0 for key in range(keys)])
    assert np.all(kept.sum(axis=1) == 10)
    assert np.all(np.abs(kept.mean(axis=0) - share) < 5 * sqrt(share * (1 - share) / keys))
    together = (kept[:, 0] & kept[:, 39]).mean()
    assert together == pytest.approx(10 * 9 / (40 * 39), abs=5 * sqrt(0.06 / keys))


@pytest.mark.parametrize("name", vectors(64))
def test_the_error_is_the_share_that_is_left_out(name: str) -> None:
    """Relative squared error n / k - 1 unbiased and 1 - k / n as kept: means over keys, for any vector."""
    tensors = {"x": vectors(64)[name]}
    for scale, expected, within in (("unbiased", 3.0, 0.6), ("kept", 0.75, 0.08)):
        errors = [error(codec(random_k(0.25, scale=scale)), tensors, key) for key in range(500)]
        assert np.mean(errors) == pytest.approx(expected, abs=within)


@pytest.mark.parametrize("fraction", [1 / 2, 1 / 8, 1 / 64])
def test_eden_below_one_bit_has_the_published_error(fraction: float) -> None:
    """n / k (1 + v) - 1 with v = pi / 2 - 1 of one bit: Vargaftik et al., EDEN, for any vector; here two of them."""
    chain = codec(random_k(fraction), {"kind": "eden", "block": 1024})
    for name in ("normal", "even"):
        tensors = {"x": vectors(2**15)[name]}
        errors = [error(chain, tensors, key) for key in range(12)]
        assert np.mean(errors) == pytest.approx(pi / 2 / fraction - 1, rel=0.06)
    bits = chain.encode(tensors, 0).wire_bits()
    kept = fraction * 2**15
    assert bits == 8 + kept + 32 * ceil(kept / 1024)  # the levels, a bit for each kept value, a scale for each block


@pytest.mark.parametrize(
    "after", [{"kind": "eden", "block": 32}, quantise(levels=1), quantise(levels=2, rounding="dithered", scale="max")]
)
@pytest.mark.parametrize("name", ["heavy", "even", "one"])
def test_no_bias_whatever_unbiased_quantiser_follows(name: str, after: dict[str, Any]) -> None:
    x, keys = vectors(32)[name], 800
    chain = codec(random_k(0.5), after)
    samples = np.array([round_trip(chain, {"x": x}, key)["x"] for key in range(keys)], dtype=np.float64)
    assert np.all(np.abs(samples.mean(axis=0) - x) <= 5 * samples.std(axis=0) / sqrt(keys) + 1e-6)
