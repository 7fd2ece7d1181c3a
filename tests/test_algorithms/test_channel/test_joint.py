"""The joint choice of rank and levels: the model compared with measured distortion, the choices with a search."""

from __future__ import annotations

import numpy as np
import pytest

from narrowcast.algorithms.channel import joint
from narrowcast.algorithms.channel.joint import RankLevelGrid, head_bits, symbol_bits
from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.entropy import Entropy
from narrowcast.algorithms.codecs.low_rank import draw_basis
from narrowcast.algorithms.codecs.quantise import Quantise

ROWS, DIMENSION = 900, 32


@pytest.mark.parametrize("rank", [2, 8, 32])
@pytest.mark.parametrize("levels", [8, 15, 60])
def test_distortion_and_bits_are_those_measured(rank: int, levels: int) -> None:
    """Normal rows, projected on fresh bases and rounded with dither, have the model's error and size."""
    random = np.random.default_rng(rank + levels)
    codec = Codec((Quantise(levels=levels, norms="column", rounding="dithered", norm_type="bfloat16"), Entropy()))
    step = ROWS**0.5 / levels
    errors, bits = [], []
    for key in range(12):
        update = random.standard_normal((ROWS, DIMENSION)).astype(np.float32)
        basis = draw_basis("orthonormal", rank, DIMENSION, key)
        components = update @ basis.T * np.float32(rank / DIMENSION)
        encoded = codec.encode({"rows": components}, key)
        received = codec.decode(encoded.to_bytes(), {"rows": components.shape}, key)["rows"] @ basis
        unbiased = received * np.float32(DIMENSION / rank)
        errors.append(np.square(unbiased - update).sum() / np.square(update).sum())
        bits.append(encoded.wire_bits())
    modelled_error = DIMENSION / rank * (1 + step**2 / 12) - 1
    modelled_bits = rank * (ROWS * np.interp(step, joint.STEPS, symbol_bits()) + 16)
    assert np.mean(errors) == pytest.approx(modelled_error, rel=0.06, abs=0.01)
    assert np.mean(bits) == pytest.approx(modelled_bits, rel=0.06, abs=200)


def test_the_entropy_is_that_of_rounded_draws() -> None:
    random = np.random.default_rng(0)
    for place in (20, 45, 60):
        symbols = np.floor(random.standard_normal(10**6) / joint.STEPS[place] + random.random(10**6)).astype(int)
        share = np.unique(symbols, return_counts=True)[1] / len(symbols)
        assert symbol_bits()[place] == pytest.approx(-(share * np.log2(share)).sum(), abs=0.01)


def test_the_best_choice_is_that_of_a_search_over_all() -> None:
    choices, rows = RankLevelGrid(8, 8, 32.0), np.array([10.0, 200.0, 700.0, 700.0, 700.0])
    heads, budgets = np.array([50.0, 400.0, 900.0, 900.0, 900.0]), np.array([10.0, 1500.0, 3000.0, 40000.0, 901.0])
    ranks, steps = choices.best(budgets, choices.values_per_rank(rows), heads)
    for client, (count, head, budget) in enumerate(zip(rows, heads, budgets, strict=True)):
        best = (np.inf, 0, 0.0)
        for rank in range(1, 9):
            for step, entropy in zip(joint.STEPS, symbol_bits(), strict=True):
                if head + rank * (count * entropy + 32) <= budget:
                    best = min(best, (8 / rank * (1 + step**2 / 12) - 1, rank, step))
        assert ranks[client] == best[1]
        assert not best[1] or steps[client] == best[2]
    assert ranks.tolist()[0] == 0 and ranks.tolist()[4] == 0
    assert ranks[2] < ranks[3] == 8


def test_curves_fall_and_are_met_by_the_best_choice() -> None:
    choices, rows = RankLevelGrid(16, 16, 32.0), np.array([100.0, 400.0, 900.0])
    curves = choices.curves(choices.values_per_rank(rows), head_bits(3000, np.array([20, 80, 200])))
    assert (np.diff(curves.bits, axis=1) >= 0).all() and (np.diff(curves.distortion, axis=1) <= 0).all()
    assert curves.weight.tolist() == rows.tolist()
    middle = curves.bits[:, 20]
    ranks, steps = choices.best(middle, choices.values_per_rank(rows), head_bits(3000, np.array([20, 80, 200])))
    reached = 16 / ranks * (1 + steps**2 / 12) - 1
    assert (reached <= curves.distortion[:, 20] * (1 + 1e-9)).all()


def test_choices_of_a_larger_error_are_left_out() -> None:
    choices = RankLevelGrid(1, 1, 32.0)
    values, heads = np.array([[500.0], [900.0]]), np.array([1500.0, 2500.0])
    every, same, fine = (choices.curves(values, heads, most) for most in (np.inf, 3.0, 0.1))
    assert np.array_equal(every.bits, same.bits)
    assert every.distortion.max() == 3.0 and 0.08 < fine.distortion.max() <= 0.1
    assert (fine.min_bits() > every.min_bits()).all()
    finest = choices.curves(values, heads, 1e-9).distortion.max()
    assert finest == pytest.approx(joint.STEPS[0] ** 2 / 12, rel=1e-9)
