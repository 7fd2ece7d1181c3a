"""Encoding of sums: bit packing, slot packing, and rounding to integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.algorithms.client.sums import MaskGroup, SumBlock, SumLayout
from narrowcast.algorithms.secure.ckks import SlotPlan
from narrowcast.algorithms.secure.schemes import FixedPoint, pack_elements, packed_bytes, unpack_elements
from narrowcast.platform.seeds import PrivateSeed
from narrowcast.platform.types import PayloadError
from secure_rounds import SCHEMES, experiment, run_rounds

GROUP = MaskGroup((SumBlock("sum", None, 50),), (SumBlock("weight", None, 20),))


@given(st.integers(1, 64), st.integers(0, 41), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_words_of_any_width_come_back(bits: int, count: int, seed: int) -> None:
    words = (
        np.random.default_rng(seed).integers(0, 2**bits, count, dtype=np.uint64, endpoint=False)
        if bits < 64
        else (np.random.default_rng(seed).integers(0, 2**64 - 1, count, dtype=np.uint64))
    )
    data = pack_elements(words, bits)
    assert len(data) == packed_bytes(count, bits)
    assert np.array_equal(unpack_elements(data, count, bits), words)
    with pytest.raises(PayloadError):
        unpack_elements(data + b"\0", count, bits)


@given(st.integers(2, 24), st.integers(1, 90), st.integers(0, 40), st.integers(0, 40), st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_slots_carry_the_sum_of_what_is_packed(
    bits: int, clients: int, n_values: int, n_counts: int, seed: int
) -> None:
    random, numbers = np.random.default_rng(seed), FixedPoint(1.0, bits, "nearest", clients, clients)
    plan = SlotPlan(n_values, n_counts, numbers.value_bits, numbers.count_bits, 40)
    most = 2 ** (bits - 1)
    all_of_them = [
        np.concatenate([random.choice([-most, most, 0, 1], n_values), random.integers(0, 2, n_counts)])
        for _ in range(clients)
    ]
    total = sum(plan.pack(each) for each in all_of_them)
    assert plan.slots == 0 or np.abs(total).max() < 2**39
    assert np.array_equal(plan.unpack(np.asarray(total, dtype=np.int64)), sum(all_of_them))


def test_rounding_at_random_is_unbiased_and_the_same_for_everyone() -> None:
    layout, partial = SumLayout((GROUP,), {}, 5, 5), {"sum": np.full(50, 0.3), "weight": np.ones(20)}
    numbers, seed = FixedPoint(1.0, 3, "stochastic", 5, 5), PrivateSeed(7)
    drawn = [numbers.of_client(partial, layout, np.ones(1, dtype=bool), seed, (r, 3))[0][:50] for r in range(400)]
    assert abs(np.mean(drawn) * numbers.step - 0.3) < 0.01
    assert len(set(np.ravel(drawn))) == 2
    again = numbers.of_client(partial, layout, np.ones(1, dtype=bool), seed, (0, 3))[0][:50]
    assert np.array_equal(drawn[0], again)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_overflows_the_clip_is_cut_and_not_wrapped(scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    outcomes = run_rounds(experiment(scheme, "secure.clip=0.001", "rounds=2"))
    state = outcomes[-1].state
    assert state is not None
    assert 0 < np.abs(state.server["update"]).max() <= 0.001 + 1e-9
    share = outcomes[0].record.clipped_share
    assert share is not None
    assert share > 0.01
    assert caplog.text.count(f"round 1: {100 * share:.1f} % of the values are larger than secure.clip = 0.001") == 1
    assert "round 2" not in caplog.text, "the warning is given once"


def test_the_values_that_are_cut_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    layout = SumLayout((GROUP, GROUP), {}, 5, 5)
    partial = {"sum": np.r_[np.full(45, 0.5), 1.0, -1.0, 1.01, -1.01, 9.0], "weight": np.ones(20)}
    numbers = FixedPoint(1.0, 8, "nearest", 5, 5)
    assert numbers.values_cut(partial, layout, np.array([True, False])) == (3, 50)
    assert numbers.values_cut(partial, layout, np.array([True, True])) == (6, 100)
    heavy = SumLayout((GROUP,), {}, 5, 5, one_weight=True)
    weighted = {"sum": 3 * partial["sum"], "weight": np.full(20, 3.0)}
    assert numbers.values_cut(weighted, heavy, np.array([True])) == (3, 50)
    assert [each.record.clipped_share for each in run_rounds(experiment(SCHEMES[1], "rounds=1"))] == [0.0]
    assert "larger than secure.clip" not in caplog.text
    assert run_rounds(experiment("none", "rounds=1"))[0].record.clipped_share is None
