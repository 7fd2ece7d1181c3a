"""Simulated histories keep every promise, are the same each time, and notice programs that break one."""

from __future__ import annotations

import pytest
from broken_variants import VARIANTS
from histories import simulate

from sampling import sampled

_BLOCK = 10
_SEEDS_FOR_A_VARIANT = 150


def broken(first: int, number: int) -> str:
    """The histories of these seeds that break a promise, with their logs."""
    return "\n\n".join(str(each) for each in map(simulate, range(first, first + number)) if each.broken)


@pytest.mark.parametrize("block", range(1))
def test_a_run_ends_with_its_model_whatever_happens(block: int) -> None:
    assert not broken(block * _BLOCK, _BLOCK)


@pytest.mark.slow
@pytest.mark.parametrize("block", sampled(range(1, 100), range(1, 7)))
def test_a_thousand_histories(block: int) -> None:
    assert not broken(block * _BLOCK, _BLOCK)


@pytest.mark.parametrize("seed", sampled([3, 8, 15], [3]))
def test_a_seed_has_one_history(seed: int) -> None:
    first, second = simulate(seed), simulate(seed)
    assert first.log == second.log
    assert first.log


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(VARIANTS, [*VARIANTS][::2]))
def test_a_broken_program_is_noticed(name: str) -> None:
    assert any(simulate(seed, VARIANTS[name]).broken for seed in range(_SEEDS_FOR_A_VARIANT))
