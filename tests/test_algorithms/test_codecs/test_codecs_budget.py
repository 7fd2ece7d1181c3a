"""Updates within a budget of bits, known before they are encoded and after."""

from __future__ import annotations

import numpy as np
import pytest

from chains import CHAINS, codec, quantise, shapes_of
from narrowcast.algorithms.codecs.budget import encode_within

TENSORS = {"Q": np.random.default_rng(0).standard_t(3, (60, 8)).astype(np.float32)}
SHAPES = shapes_of(TENSORS)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("budget", [0, 60, 500, 1200, 2400, 20_000])
def test_what_is_encoded_within_a_budget_fits(name: str, budget: int) -> None:
    chain = CHAINS[name]
    found = encode_within(chain, TENSORS, 3, budget, chain.init_state(SHAPES), finest=64)
    if found is None:
        coarsest = chain if chain.levels_allowed is None else chain.with_levels(chain.levels_allowed.start)
        assert coarsest.encode(TENSORS, 3).wire_bits() > budget
    else:
        assert found[0].wire_bits() <= budget
        assert set(chain.decode(found[0].to_bytes(), SHAPES, 3)) == set(SHAPES)
        assert {each: np.shape(values) for each, values in found[1].items()} == {
            each: np.shape(values) for each, values in chain.init_state(SHAPES).items()
        }


@pytest.mark.parametrize("budget", [900, 1500, 2000, 2700])
def test_entropy_coding_buys_more_levels(budget: int) -> None:
    """The slow reference again: levels a little finer than those found do not fit."""
    coded, packed = codec(quantise(scale="max"), "entropy"), codec(quantise(scale="max"))
    found = encode_within(coded, TENSORS, 3, budget)
    assert found is not None
    levels = next(k for k in range(1, 500) if coded.with_levels(k).encode(TENSORS, 3).data == found[0].data)
    assert coded.with_levels(levels + 1 + levels // 32).encode(TENSORS, 3).wire_bits() > budget
    assert packed.with_levels(levels).max_bits(SHAPES) > budget
    assert found[0].wire_bits() > 0.8 * budget


def test_nothing_fits_in_no_bits() -> None:
    for chain in CHAINS.values():
        assert encode_within(chain, TENSORS, 0, 0) is None


@pytest.mark.parametrize("coder", [(), ("entropy",)], ids=["packed", "coded"])
def test_a_budget_that_one_level_fits_is_enough(coder: tuple[str, ...]) -> None:
    """The coarsest quantiser has the levels -1, 0 and 1."""
    chain = codec(quantise(levels=9), *coder)
    one, two = (chain.with_levels(levels).encode(TENSORS, 3) for levels in (1, 2))
    assert one.wire_bits() < two.wire_bits()
    found = encode_within(chain, TENSORS, 3, one.wire_bits())
    assert found is not None
    assert found[0].data == one.data
