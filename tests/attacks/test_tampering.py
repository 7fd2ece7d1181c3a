"""What attackers claim, against searches, brute force and tables of the papers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from narrowcast.algorithms.attacks.tampering import (
    ALIE,
    InnerProduct,
    Mimic,
    MinMax,
    MinSum,
    Omniscient,
    Replacement,
    largest_z,
    perturbation,
)
from narrowcast.platform.rounds.adversary import Seen

DIRECTIONS = ["mean", "std", "sign"]


def seen(attackers: int = 3, others: int = 8, seed: int = 0) -> tuple[Any, Seen]:
    draw = np.random.default_rng(seed)
    own, of_others = draw.normal(size=(attackers, 20)), draw.normal(size=(others, 20)) * draw.uniform(0.2, 3, 20) + 0.3
    weights = draw.integers(5, 60, attackers).astype(float), draw.integers(5, 60, others).astype(float)
    return own, Seen(weights[0], of_others, weights[1], np.random.default_rng(1))


def by_bisection(allowed: Any) -> float:
    """The largest gamma that is allowed, where all smaller ones are."""
    low, high = 0.0, 1.0
    while allowed(high):
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_min_max_goes_as_far_as_a_search(direction: Any, seed: int) -> None:
    own, known = seen(seed=seed)
    honest, mean, d = known.others, known.others.mean(axis=0), perturbation(known.others, direction)
    largest = max(np.linalg.norm(x - y) for x in honest for y in honest)

    def allowed(gamma: float) -> bool:
        return max(np.linalg.norm(mean - gamma * d - x) for x in honest) <= largest

    claims = MinMax(direction=direction).tamper(own, known)
    np.testing.assert_allclose(claims, np.tile(mean - by_bisection(allowed) * d, (3, 1)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("bound", "chosen"), [("smallest", min), ("largest", max)])
def test_min_sum_goes_as_far_as_a_search(bound: Any, chosen: Any, direction: Any, seed: int) -> None:
    own, known = seen(seed=seed)
    honest, mean, d = known.others, known.others.mean(axis=0), perturbation(known.others, direction)
    most = chosen(sum(np.linalg.norm(x - y) ** 2 for y in honest) for x in honest)

    def allowed(gamma: float) -> bool:
        return sum(np.linalg.norm(mean - gamma * d - x) ** 2 for x in honest) <= most

    claims = MinSum(direction=direction, bound=bound).tamper(own, known)
    np.testing.assert_allclose(claims[1], mean - by_bisection(allowed) * d, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("attack", [MinMax(), MinSum()])
def test_equal_honest_changes_leave_no_room(attack: Any) -> None:
    own, known = seen()
    same = Seen(known.weights, np.tile(known.others[:1], (4, 1)), np.ones(4), known.draw)
    np.testing.assert_allclose(attack.tamper(own, same), same.others[:3], atol=1e-7)


@pytest.mark.parametrize(
    ("n", "m", "z"),
    [(50, 24, 1.426), (51, 12, 0.361), (10, 2, 0.0), (10, 4, 0.431), (20, 4, 0.157), (100, 20, 0.286), (50, 10, 0.253)],
)
def test_a_little_that_is_enough_is_that_of_the_papers_formula(n: int, m: int, z: float) -> None:
    assert largest_z(n, m) == pytest.approx(z, abs=5e-4)
    own, known = seen(m, n - m)
    of_others = known.others
    claims = ALIE().tamper(own, known)
    np.testing.assert_allclose(claims, np.tile(of_others.mean(0) - largest_z(n, m) * of_others.std(0), (m, 1)))


def test_attackers_of_a_group_know_their_own_changes_alone() -> None:
    own, known = seen()
    alone = Seen(known.weights, known.others[:0], known.other_weights[:0], known.draw)
    np.testing.assert_allclose(ALIE(view="group", z=1.5).tamper(own, alone)[0], own.mean(0) - 1.5 * own.std(0))
    np.testing.assert_allclose(InnerProduct(view="group", scale=2).tamper(own, alone)[2], -2 * own.mean(0))


def test_omniscient_attackers_turn_the_weighted_mean_around() -> None:
    own, known = seen()
    weights, honest = np.concatenate([known.weights, known.other_weights]), np.concatenate([own, known.others])
    claims = np.concatenate([Omniscient().tamper(own, known), known.others])
    mean, attacked = (np.average(changes, axis=0, weights=weights) for changes in (honest, claims))
    np.testing.assert_allclose(attacked, -mean, atol=1e-12)


def test_with_idle_peers_the_new_model_is_the_attackers() -> None:
    own, known = seen()
    idle = Seen(known.weights, np.zeros((8, 20)), known.other_weights, known.draw)
    claims = np.concatenate([Replacement().tamper(own, idle), idle.others])
    mean = np.average(claims, axis=0, weights=np.concatenate([known.weights, known.other_weights]))
    np.testing.assert_allclose(mean, np.average(own, axis=0, weights=known.weights), atol=1e-12)
    alone = Seen(known.weights[:1], idle.others, known.other_weights, known.draw)
    (claim,) = Replacement().tamper(own[:1], alone)
    total = known.weights[0] + known.other_weights.sum()
    np.testing.assert_allclose(known.weights[0] * claim / total, own[0], atol=1e-12)


def test_train_and_scale_passes_a_test_of_norms() -> None:
    own, known = seen()
    claims = Replacement(norm=2.5).tamper(own, known)
    np.testing.assert_allclose(np.linalg.norm(claims, axis=1), 2.5)
    np.testing.assert_allclose(claims / 2.5, own / np.linalg.norm(own, axis=1, keepdims=True))
    short = Replacement(norm=1e9, factor=3).tamper(own, known)
    np.testing.assert_allclose(short, 3 * own)


def test_mimics_copy_the_client_that_differs_most() -> None:
    draw = np.random.default_rng(3)
    others = 0.01 * draw.normal(size=(9, 20))
    others[4] += 5 * draw.normal(size=20)
    own, known = seen()
    claims = Mimic().tamper(own, Seen(known.weights, others, np.ones(9), known.draw))
    assert np.array_equal(claims, np.tile(others[4], (3, 1)))
