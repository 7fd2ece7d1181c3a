"""Top-K and where its values stand; values in fewer bits."""

from __future__ import annotations

from math import ceil, comb, log2

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chains import Array, codec, round_trip, shapes_of
from narrowcast.algorithms.codecs.wire import Reader, max_index_bytes, read_indices, write_indices
from narrowcast.platform.types import PayloadError


def heavy(shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_t(2, shape).astype(np.float32)


@pytest.mark.parametrize("ratio", [1 / 64, 4 / 64, 0.5, 1.0])
def test_top_k_is_what_the_released_code_keeps(ratio: float) -> None:
    """The slow reference: ceil(ratio n) of the flattened update by torch.topk of the magnitudes, zeros elsewhere."""
    update = heavy((37, 8))
    flat = torch.from_numpy(update).flatten()
    kept = ceil(ratio * len(flat))
    _, places = torch.topk(flat.abs(), kept)
    expected = torch.zeros_like(flat)
    expected[places] = flat[places]
    chain = codec({"kind": "top_k", "fraction": ratio, "indices": "int32"})
    assert np.array_equal(round_trip(chain, {"Q": update}, 0)["Q"], expected.reshape(37, 8).numpy())
    assert chain.encode({"Q": update}, 0).wire_bits() == 64 * kept


def test_top_k_weighs_what_the_papers_table_says() -> None:
    """Top-K at 1/64 of 3706 x 64 values: 29 KB, 8 bytes a value, in its table 3; its plots count half of that."""
    chain = codec({"kind": "top_k", "fraction": 1 / 64, "indices": "int32"})
    bits = chain.encode({"Q": heavy((3706, 64))}, 0).wire_bits()
    assert round(bits / 8 / 1024) == 29
    assert codec({"kind": "top_k", "fraction": 1 / 64}).encode({"Q": heavy((3706, 64))}, 0).wire_bits() < 0.62 * bits


@pytest.mark.parametrize("count", [1, 5, 20, 39])
def test_of_equal_magnitudes_the_first_are_kept(count: int) -> None:
    """The slow reference: a stable sort by falling magnitude, in Python."""
    values = np.random.default_rng(count).choice(np.float32([-2, -1, 0, 1, 2]), 40)
    places = sorted(range(40), key=lambda place: -abs(values[place]))[:count]
    expected = np.zeros(40, np.float32)
    expected[places] = values[places]
    assert np.array_equal(round_trip(codec({"kind": "top_k", "count": count}), {"Q": values}, 0)["Q"], expected)


@pytest.mark.parametrize(
    ("fraction", "size", "kept"), [(0.07, 100, 7), (0.1, 70, 7), (0.1, 71, 8), (1e-9, 5, 1), (1.0, 9, 9)]
)
@pytest.mark.parametrize("kind", ["top_k", "random_k"])
def test_a_fraction_is_that_of_exact_numbers(kind: str, fraction: float, size: int, kept: int) -> None:
    back = round_trip(codec({"kind": kind, "fraction": fraction}), {"Q": heavy((size,))}, 0)["Q"]
    assert np.count_nonzero(back) == kept


@pytest.mark.parametrize("magnitude", [0, 0.5, 1, 3])
def test_values_above_a_threshold_arrive_and_are_billed_with_their_places(magnitude: float) -> None:
    tensors = {"a": heavy((30,)).round(1), "b": heavy((4, 9), 1).round(1)}
    chain = codec({"kind": "threshold", "magnitude": magnitude, "indices": "int32"})
    back = round_trip(chain, tensors, 0)
    assert all(np.array_equal(back[name], np.where(abs(x) > magnitude, x, 0)) for name, x in tensors.items())
    kept = sum(int((abs(x) > magnitude).sum()) for x in tensors.values())
    assert chain.encode(tensors, 0).wire_bits() == 8 + 64 * kept


def test_places_count_over_all_tensors() -> None:
    tensors = {"a": np.array([1, -5, 0], np.float32), "b": np.array([[3, 4], [-6, 0.5]], np.float32)}
    back = round_trip(codec({"kind": "top_k", "count": 3}), tensors, 0)
    assert np.array_equal(back["a"], [0, -5, 0])
    assert np.array_equal(back["b"], [[0, 4], [-6, 0]])
    everything = round_trip(codec({"kind": "top_k", "count": 100}), tensors, 0)
    assert all(np.array_equal(everything[name], tensors[name]) for name in tensors)


@settings(derandomize=True, max_examples=300, deadline=None, database=None)
@given(st.integers(0, 400), st.floats(0, 1), st.integers(0, 2**32), st.sampled_from(["smallest", "int32"]))
def test_places_come_back(count: int, share: float, seed: int, layout: str) -> None:
    places = np.flatnonzero(np.random.default_rng(seed).random(count) < share)
    data = write_indices(places, count, layout)
    assert len(data) <= max_index_bytes(len(places), count, layout)
    reader = Reader(data)
    assert np.array_equal(read_indices(reader, len(places), count, layout), places)
    reader.finish()


@pytest.mark.parametrize(("kept", "form"), [(1, 0), (2500, 2), (100, 2), (60_000, 1)])
def test_the_smallest_form_is_near_the_least_there_is(kept: int, form: int) -> None:
    """log2 of the number of ways to choose k of n: a list for one, gaps for few, a bitmap for half of them."""
    count = 120_000
    places = np.sort(np.random.default_rng(0).choice(count, kept, replace=False))
    data = write_indices(places, count, "smallest")
    assert data[0] == form
    least = log2(comb(count, kept))
    assert least <= 8 * len(data) < 1.02 * least + 32


@pytest.mark.parametrize("kept", [3, 40, 200])
def test_places_that_are_none_are_refused(kept: int) -> None:
    places = np.sort(np.random.default_rng(0).choice(400, kept, replace=False))
    data = write_indices(places, 400, "smallest")
    for other in (kept - 1, kept + 1):
        with pytest.raises(PayloadError):
            reader = Reader(data)
            read_indices(reader, other, 400, "smallest")
            reader.finish()
    with pytest.raises(PayloadError, match="form 3"):
        read_indices(Reader(b"\3" + data[1:]), kept, 400, "smallest")


@pytest.mark.parametrize("places", [[3, 3], [5, 2], [1, 400]])
def test_places_twice_or_out_of_order_or_beyond_are_refused(places: list[int]) -> None:
    with pytest.raises(PayloadError, match="each once and in order"):
        read_indices(Reader(np.array(places, dtype="<u4").tobytes()), 2, 400, "int32")


@pytest.mark.parametrize(("dtype", "reference"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)])
def test_casts_are_torchs(dtype: str, reference: torch.dtype) -> None:
    random = np.random.default_rng(0)
    x = (random.standard_cauchy(5000) * 10.0 ** random.integers(-9, 3, 5000)).astype(np.float32)
    x = np.clip(x, -60000, 60000)
    expected = torch.from_numpy(x).to(reference).float().numpy()
    chain = codec({"kind": "cast", "dtype": dtype})
    assert np.array_equal(round_trip(chain, {"x": x}, 0)["x"], expected)
    assert chain.encode({"x": x}, 0).wire_bits() == 16 * 5000


def test_what_is_too_large_for_a_half_becomes_its_largest() -> None:
    x = np.array([1e6, -7e4, 65504, 65519], dtype=np.float32)
    assert np.array_equal(round_trip(codec("cast"), {"x": x}, 0)["x"], [65504, -65504, 65504, 65504])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_that_are_not_finite_are_refused(dtype: str) -> None:
    data = b"\xff" * (4 if dtype == "float32" else 2)
    with pytest.raises(PayloadError, match="not finite"):
        codec({"kind": "cast", "dtype": dtype}).decode(data, {"x": (1,)}, 0)


def test_values_can_be_quantised_and_coded() -> None:
    tensors = {"Q": heavy((200, 8))}
    chain = codec({"kind": "top_k", "fraction": 0.05}, {"kind": "quantise", "scale": "max"}, "entropy")
    back = chain.decode(chain.encode(tensors, 1).to_bytes(), shapes_of(tensors), 1)["Q"]
    assert np.count_nonzero(back) <= 80
    assert (
        chain.encode(tensors, 1).wire_bits() < codec({"kind": "top_k", "fraction": 0.05}).encode(tensors, 1).wire_bits()
    )
