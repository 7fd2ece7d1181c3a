"""ATOMO: the probabilities against the paper's algorithm and a general solver, and what arrives on average."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from scipy.optimize import minimize

from chains import Array, codec, matrix, round_trip
from narrowcast.algorithms.codecs.atomo import Directions
from narrowcast.platform.types import PayloadError


def directions(strength: Array, lengths: Array | None = None) -> Directions:
    return Directions({}, strength, np.ones((len(strength), 2)) if lengths is None else lengths)


def by_the_paper(strength: Array, sparsity: float) -> Array:
    """Wang et al., Algorithm 1, word by word: atoms in descending order, one after the other."""
    p, left = np.zeros(len(strength)), sparsity
    for place, each in enumerate(strength):
        rest = strength[place:].sum()
        if each * left <= rest:
            p[place:] = strength[place:] * left / rest
            return p
        p[place], left = 1.0, left - 1
    return p


@pytest.mark.parametrize("sparsity", [0.5, 1, 3, 7.5, 12, 20])
def test_the_probabilities_of_equal_atoms_are_the_papers(sparsity: float) -> None:
    for seed in range(20):
        strength = np.sort(np.random.default_rng(seed).pareto(1.5, 12))[::-1]
        got = directions(strength).probabilities(np.ones(12), sparsity)
        assert np.allclose(got, by_the_paper(strength, sparsity))
        assert got.sum() == pytest.approx(min(sparsity, 12))


def test_no_other_probabilities_of_this_weight_have_less_variance() -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        strength, weight = random.pareto(1.5, 8) + 0.05, random.uniform(1, 40, 8)
        total = random.uniform(0.2, 0.9) * weight.sum()
        got = directions(strength).probabilities(weight, total)
        found = minimize(
            lambda p, s=strength: (s**2 / p).sum() / (s**2).sum(),
            np.full(8, total / weight.sum()),
            method="SLSQP",
            bounds=[(1e-4, 1.0)] * 8,
            constraints={"type": "eq", "fun": lambda p, w=weight, t=total: (p @ w - t) / t},
            options={"maxiter": 500, "ftol": 1e-9},  # a finer one fails by rounding with some numbers of threads
        )
        assert found.success
        assert got @ weight == pytest.approx(total) and (got <= 1).all()
        assert (strength**2 / got).sum() / (strength**2).sum() <= found.fun * (1 + 1e-6)


def test_directions_without_strength_are_not_drawn() -> None:
    none = directions(np.array([0.0, 0.0]))
    assert none.probabilities(np.ones(2), 1.0).tolist() == [0.0, 0.0]
    assert directions(np.array([2.0, 0.0])).probabilities(np.ones(2), 5.0).tolist() == [1.0, 0.0]
    assert directions(np.empty(0)).probabilities(np.empty(0), 5.0).tolist() == []


@pytest.mark.slow
def test_the_mean_is_the_update_and_the_variance_what_was_minimised() -> None:
    update = {"Q": matrix(30, 12), "kernel": matrix(10, 18, seed=1).reshape(10, 2, 3, 3), "bias": np.ones(4, "f")}
    chain = codec({"kind": "atomo", "fraction": 0.4})
    found = Directions.of(update, 64)
    p = found.probabilities(found.lengths.sum(axis=1), 0.4 * (30 * 12 + 10 * 18))
    expected = float((found.strength**2 * (1 / p - 1)).sum())
    back = [round_trip(chain, update, key) for key in range(1500)]
    for name, values in update.items():
        samples = np.array([each[name] for each in back])
        assert np.all(np.abs(samples.mean(axis=0) - values) <= 5 * samples.std(axis=0) / sqrt(len(back)) + 1e-6)
    errors = [sum(float(((each[name] - values) ** 2).sum()) for name, values in update.items()) for each in back]
    assert np.mean(errors) == pytest.approx(expected, rel=0.15)


def test_as_many_are_drawn_as_the_probabilities_say() -> None:
    found = Directions.of({"Q": matrix(30, 12)}, 64)
    p = found.probabilities(np.full(12, 42.0), 4.3 * 42)
    drawn = {found.draw(p, key)[0][0] for key in range(200)}
    assert drawn == {4, 5}


def test_with_room_for_all_nothing_is_lost() -> None:
    values = matrix(100, 12)
    assert np.allclose(round_trip(codec({"kind": "atomo", "fraction": 2}), {"Q": values}, 0)["Q"], values, atol=1e-6)


def test_beyond_its_rank_a_matrix_is_cut() -> None:
    values = matrix(100, 12)
    got = round_trip(codec({"kind": "atomo", "fraction": 2, "rank": 2}), {"Q": values}, 0)["Q"]
    assert np.linalg.matrix_rank(got) == 2
    data = codec({"kind": "atomo", "fraction": 2, "rank": 3}).encode({"Q": values}, 0).to_bytes()
    with pytest.raises(PayloadError):
        codec({"kind": "atomo", "rank": 2}).decode(data, {"Q": (100, 12)}, 0)


def test_updates_without_rows_are_sent() -> None:
    chain, tensors = codec("atomo", "cast"), {"Q": np.empty((0, 4), "f"), "bias": np.ones(3, "f")}
    back = round_trip(chain, tensors, 0)
    assert back["Q"].shape == (0, 4) and back["bias"].tolist() == [1, 1, 1]
