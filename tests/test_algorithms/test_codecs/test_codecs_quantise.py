"""Stochastic quantisation against a slow reference, its mean, and its variance against the papers' bounds."""

from __future__ import annotations

from math import floor, sqrt
from typing import Any

import numpy as np
import pytest

from chains import Array, codec, quantise, round_trip
from narrowcast.algorithms.codecs.chain import Codec, stream
from narrowcast.algorithms.codecs.wire import packed_bytes
from narrowcast.platform.seeds import uniform_bits
from narrowcast.platform.types import PayloadError

KEYS = 1000


def vectors() -> dict[str, Array]:
    random = np.random.default_rng(0)
    vectors = {
        "normal": random.standard_normal(60),
        "heavy": random.standard_t(1.5, 60),
        "one": np.eye(60)[7] * 3,
        "even": np.ones(64),
        "half way": np.ones(100) * 0.1,  # between two levels for k = 5: the bound d / 4k^2 with equality
        "small": np.array([1.0, -1e-6, 0.0]),
    }
    return {name: values.astype(np.float32) for name, values in vectors.items()}


def exact_norm(x: Array, scale: str = "l2") -> float:
    x = x.astype(np.float64)
    return float(np.abs(x).max() if scale == "max" else sqrt((x * x).sum()))


def variance(x: Array, norm: float, levels: int) -> float:
    """The expected squared error of the report's eq. (5), exactly: a step squared times the sum of f (1 - f)."""
    left = np.abs(x.astype(np.float64)) / norm * levels % 1.0
    return float((norm / levels) ** 2 * (left * (1 - left)).sum())


def many(chain: Codec, x: Array, keys: int = KEYS) -> Array:
    return np.array([round_trip(chain, {"x": x}, key)["x"] for key in range(keys)], dtype=np.float64)


def mean_is(x: Array, samples: Array, step: Array | float) -> bool:
    """Whether the mean of the samples is x in every place, within 5 of its deviations, seen ones or eq. (5)'s."""
    left = np.abs(x.astype(np.float64)) / step % 1.0
    deviation = np.maximum(samples.std(axis=0), step * np.sqrt(left * (1 - left))) / sqrt(len(samples))
    return bool(np.all(np.abs(samples.mean(axis=0) - x) <= 5 * deviation + 1e-6 * np.abs(x)))


@pytest.mark.parametrize(
    "fields", [{}, {"scale": "max"}, {"norms": 7}, {"rounding": "dithered"}, {"rounding": "nearest"}]
)
@pytest.mark.parametrize("name", vectors())
def test_values_are_those_of_a_loop_over_them(name: str, fields: dict[str, Any]) -> None:
    """The slow reference: floor(k x / norm + u), with u from the seeds' own streams."""
    x, levels, key = vectors()[name], 5, 99
    back = round_trip(codec(quantise(levels=levels, **fields)), {"x": x}, key)["x"]
    words = uniform_bits(stream(key, "rounding"), np.arange(len(x)))
    for start in range(0, len(x), fields.get("norms", len(x))):
        group = slice(start, start + fields.get("norms", len(x)))
        norm = exact_norm(x[group], fields.get("scale", "l2"))
        for value, word, got in zip(x[group].tolist(), words[group].tolist(), back[group].tolist(), strict=True):
            uniform = 0.5 if fields.get("rounding") == "nearest" else (word >> 11) * 2.0**-53
            place = value / norm * levels + uniform if norm else 0.0
            if abs(place - round(place)) < 1e-6 and value:
                continue  # a tie, which the norm's own rounding decides
            expected = norm * (floor(place) + (0.5 - uniform if fields.get("rounding") == "dithered" else 0)) / levels
            assert got == pytest.approx(expected, rel=1e-5, abs=1e-6 * norm)


@pytest.mark.parametrize("levels", [1, 2, 5, 100])
@pytest.mark.parametrize("name", vectors())
def test_each_value_becomes_one_of_its_two_neighbours_and_is_right_on_average(name: str, levels: int) -> None:
    """Two neighbours and the right mean are eq. (5): the probabilities follow from them."""
    x = vectors()[name]
    samples = many(codec(quantise(levels=levels)), x)
    step = exact_norm(x) / levels
    assert np.all(np.abs(samples / step - np.rint(samples / step)) < 1e-4)
    assert np.all(np.abs(samples - x) < step * (1 + 1e-5))
    assert np.all(samples * x >= 0)
    assert mean_is(x, samples, step)


@pytest.mark.parametrize("levels", [1, 2, 5, 100])
@pytest.mark.parametrize("name", vectors())
def test_variance_is_the_exact_one_and_within_both_bounds(name: str, levels: int) -> None:
    x = vectors()[name]
    expected, energy = variance(x, exact_norm(x), levels), exact_norm(x) ** 2
    assert expected <= min(len(x) / (4 * levels**2), sqrt(len(x)) / levels) * energy * (1 + 1e-9)
    errors = ((many(codec(quantise(levels=levels)), x) - x) ** 2).sum(axis=1)
    assert errors.mean() == pytest.approx(expected, abs=5 * errors.std() / sqrt(KEYS) + 1e-5 * energy / levels)


@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.parametrize("name", ["normal", "heavy"])
def test_blocks_are_within_qsgds_bounds_and_their_zeros_are_cheap(name: str, levels: int) -> None:
    """Alistarh et al., Lemma 3.1 for each bucket of d = 512: variance, and at most k (k + sqrt(d)) values not zero."""
    random = np.random.default_rng(1)
    x = (random.standard_normal(2048) if name == "normal" else random.standard_t(2, 2048)).astype(np.float32)
    chain = codec(quantise(levels=levels, norms=512), "entropy")
    samples = many(chain, x, keys=40).reshape(40, 4, 512)
    blocks = x.reshape(4, 512)
    energy = (blocks.astype(np.float64) ** 2).sum(axis=1)
    lost = ((samples - blocks) ** 2).sum(axis=2).mean(axis=0)
    assert np.all(lost <= 1.1 * min(512 / levels**2, sqrt(512) / levels) * energy)
    assert np.all((samples != 0).sum(axis=2).mean(axis=0) <= levels * (levels + sqrt(512)))
    assert chain.encode({"x": x}, 0).wire_bits() < (0.45 if levels == 1 else 0.85) * 2048


def test_the_bounds_are_met_with_equality_or_nearly() -> None:
    half_way = vectors()["half way"]
    assert variance(half_way, exact_norm(half_way), 5) == pytest.approx(100 / (4 * 5**2) * exact_norm(half_way) ** 2)
    even = np.ones(10**4, np.float32)
    assert variance(even, exact_norm(even), 1) == pytest.approx((sqrt(len(even)) - 1) * exact_norm(even) ** 2)


@pytest.mark.parametrize("norm_type", ["float32", "bfloat16"])
@pytest.mark.parametrize("fields", [{"norms": "row"}, {"norms": "column", "scale": "max"}, {"norms": 9}])
def test_no_bias_whatever_shares_a_norm_and_however_it_is_sent(norm_type: str, fields: dict[str, Any]) -> None:
    x = (np.random.default_rng(3).standard_t(2, (12, 5)) * np.logspace(-3, 3, 12)[:, None]).astype(np.float32)
    chain = codec(quantise(levels=2, norm_type=norm_type, **fields))
    samples = many(chain, x)
    norms = norms_of(x, fields)
    if norm_type == "bfloat16":  # eight significant bits, upwards
        ulp = 2.0 ** (np.floor(np.log2(norms)) - 7)
        norms = np.ceil(norms / ulp) * ulp
    assert mean_is(x, samples, norms / 2)
    if fields["norms"] == "row":
        rows = [variance(row, exact_norm(row), 2) for row in x]
        slack = 1.001 if norm_type == "float32" else (1 + 2**-7) ** 2 * 1.001
        bounds = np.array([min(5 / 16, sqrt(5) / 2) * exact_norm(row) ** 2 for row in x])
        errors = ((samples - x) ** 2).sum(axis=2)
        assert np.all(errors.mean(axis=0) <= bounds * slack + 5 * errors.std(axis=0) / sqrt(KEYS))
        assert norm_type == "bfloat16" or np.allclose(errors.mean(axis=0), rows, rtol=0.2)


def norms_of(x: Array, fields: dict[str, Any]) -> Array:
    """The norm of each value's row, column or run of nine."""
    if fields["norms"] == "column":
        return np.broadcast_to(np.abs(x).max(axis=0), x.shape).astype(np.float64)
    groups = x if fields["norms"] == "row" else [x.ravel()[start : start + 9] for start in range(0, x.size, 9)]
    return np.concatenate([np.full(group.size, exact_norm(group)) for group in groups]).reshape(x.shape)


@pytest.mark.parametrize(("norm_type", "dtype", "slack"), [("float32", "<u4", 2**-23), ("bfloat16", "<u2", 2**-7)])
def test_norms_are_sent_rounded_up(norm_type: str, dtype: str, slack: float) -> None:
    """Else the largest value could lie beyond the last level, and be cut."""
    chain = codec(quantise(levels=7, norm_type=norm_type))
    for seed in range(100):
        x = np.random.default_rng(seed).standard_normal(9).astype(np.float32)
        words = np.frombuffer(chain.encode({"x": x}, 0).data, dtype=dtype, count=1, offset=1).astype(np.uint32)
        sent = float((words << (16 if norm_type == "bfloat16" else 0)).view(np.float32)[0])
        assert exact_norm(x) <= sent <= exact_norm(x) * (1 + slack)


def test_dithered_has_no_bias_and_a_twelfth_of_a_squared_step() -> None:
    x = vectors()["heavy"]
    samples = many(codec(quantise(levels=3, scale="max", rounding="dithered")), x)
    step = exact_norm(x, "max") / 3
    assert mean_is(x, samples, step)
    assert np.allclose(samples.var(axis=0), step**2 / 12, rtol=0.15)
    assert np.all(np.abs(samples - x) <= step / 2 * (1 + 1e-5))


def test_nearest_is_nearest() -> None:
    x = vectors()["normal"]
    step = exact_norm(x, "max") / 9
    back = round_trip(codec(quantise(levels=9, scale="max", rounding="nearest")), {"x": x}, 0)["x"]
    assert np.abs(back - x).max() <= step / 2 * (1 + 1e-5)


@pytest.mark.parametrize(
    ("norms", "bits"), [("tensor", 32), ("row", 32 * 20), ("column", 32 * 8), (50, 32 * 4), (1000, 32)]
)
def test_what_a_norm_costs(norms: Any, bits: int) -> None:
    """A byte of levels, the norms, and 160 symbols of 15."""
    symbols = 8 * packed_bytes(160, 15)
    tensors = {"Q": np.random.default_rng(0).standard_normal((20, 8)).astype(np.float32)}
    assert codec(quantise(norms=norms)).encode(tensors, 0).wire_bits() == 8 + bits + symbols
    assert codec(quantise(norms=norms, norm_type="bfloat16")).encode(tensors, 0).wire_bits() == 8 + bits / 2 + symbols


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_norms_that_are_none_are_refused(bad: float) -> None:
    chain = codec(quantise(levels=7))
    data = chain.encode({"x": np.ones(4, np.float32)}, 0).to_bytes()
    forged = data[:1] + np.array([bad], dtype="<f4").tobytes() + data[5:]
    with pytest.raises(PayloadError, match="norms that are negative or not finite"):
        chain.decode(forged, {"x": (4,)}, 0)


def test_no_levels_are_refused() -> None:
    with pytest.raises(PayloadError, match="no levels"):
        codec("quantise").decode(bytes(5), {"x": (1,)}, 0)


def test_two_keys_round_apart_and_two_tensors_too() -> None:
    x = np.full(200, 0.3, np.float32)
    chain = codec(quantise(levels=1))
    first = round_trip(chain, {"a": x, "b": x}, 1)
    assert not np.array_equal(first["a"], first["b"])
    assert not np.array_equal(first["a"], round_trip(chain, {"a": x, "b": x}, 2)["a"])
