"""Completion as a semidefinite program: its certificate, exact recovery and its limit, against other methods."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from narrowcast.platform.types import Arrays, FloatArray
from narrowcast.solves.burer_monteiro import BurerMonteiro
from narrowcast.solves.completion_problems import Completion, HeldOut, SyntheticCompletion
from narrowcast.solves.frank_wolfe import InFaceFrankWolfe
from narrowcast.solves.observed import observe, observed_at
from narrowcast.solves.thresholding import SoftImpute


def drawn(fraction: float, seed: int = 0) -> Completion:
    return SyntheticCompletion(rows=60, columns=50, rank=2, fraction=fraction, condition=3, seed=seed).load()


def solved(solver: Any, problem: Completion, iterations: int, residual: float = 1e-8) -> Arrays:
    state = solver.init(problem, 0)
    for _ in range(iterations):
        state, report = solver.step(problem, state)
        if report.residual <= residual or report.status != "running":
            break
    answer: Arrays = solver.answer(state)
    return answer


def whole(problem: Completion, answer: Arrays) -> FloatArray:
    left, right = np.split(answer["vectors"], [problem.observed.rows])
    return np.asarray(left @ right.T)


def norm_of(truth: Any) -> float:
    return float(np.linalg.norm(truth[0] @ truth[1].T, "nuc"))


def test_constraints_are_the_entries_and_the_cost_half_the_trace() -> None:
    problem = drawn(0.3)
    vectors = np.random.default_rng(0).normal(size=(110, 4))
    wanted = whole(problem, {"vectors": vectors})[problem.observed.row_of_entries(), problem.observed.indices]
    np.testing.assert_allclose(problem.program.violations(vectors), wanted - problem.observed.values, atol=1e-12)
    assert problem.program.objective(vectors) == pytest.approx(np.sum(vectors**2) / 2, rel=1e-12)
    assert problem.program.sizes == {"side": 110, "constraints": 900}


@pytest.mark.parametrize("size", [0.01, 1.0, 100.0])
def test_a_dual_point_bounds_the_nuclear_norm_after_its_spectral_norm_is_made_one(size: float) -> None:
    problem = drawn(0.3)
    random = np.random.default_rng(1)
    for _ in range(5):
        dual = size * (problem.observed.values + 0.1 * random.normal(size=problem.observed.count))
        spread = np.zeros((60, 50))
        spread[problem.observed.row_of_entries(), problem.observed.indices] = dual
        exact = float(dual @ problem.observed.values) / max(1.0, float(np.linalg.norm(spread, 2)))
        assert exact > 0
        assert exact * (1 - 1e-6) < problem.program.bound(dual) <= exact
        assert problem.program.bound(dual) < norm_of(problem.truth)
        assert problem.program.bound(-1e6 * dual) == 0


def test_the_bound_of_no_dual_point_is_zero() -> None:
    assert drawn(0.3).program.bound(np.zeros(900)) == 0


@pytest.mark.parametrize("seed", range(3))
def test_enough_entries_are_completed_exactly_and_the_norm_is_proved(seed: int) -> None:
    problem = drawn(0.5, seed)
    metrics = problem.measure(solved(BurerMonteiro(rank=6), problem, 40))
    assert metrics["test.unseen_error"] <= 1e-6
    assert metrics["test.relative_error"] <= 1e-6
    assert metrics["objective"] == pytest.approx(norm_of(problem.truth), rel=1e-6)
    assert metrics["gap"] <= 1e-6
    assert metrics["infeasibility"] <= 1e-7
    assert metrics["rank"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_fewer_entries_than_parameters_have_a_completion_of_smaller_norm(seed: int) -> None:
    problem = SyntheticCompletion(rows=30, columns=25, rank=2, fraction=0.12, condition=3, seed=seed).load()
    assert problem.observed.count == 90 < 2 * (30 + 25 - 2)
    metrics = problem.measure(solved(BurerMonteiro(rank=12), problem, 40))
    assert metrics["infeasibility"] <= 1e-5
    assert metrics["objective"] < 0.9 * norm_of(problem.truth)
    assert metrics["gap"] <= 1e-4
    assert metrics["test.unseen_error"] > 0.3


def least_norm(values: FloatArray, seen: FloatArray, steps: int = 4000) -> float:
    """Return the least nuclear norm by Douglas and Rachford's splitting with dense singular values."""
    point = np.where(seen, values, 0.0)
    for _ in range(steps):
        left, spread, right = np.linalg.svd(point, full_matrices=False)
        shrunk = (left * np.maximum(spread - 1.0, 0)) @ right
        mirrored = 2 * shrunk - point
        point = point + np.where(seen, values, mirrored) - shrunk
    return float(np.linalg.norm(np.where(seen, values, shrunk), "nuc"))


def test_the_norm_is_that_of_a_splitting_method_where_no_matrix_of_low_rank_fits() -> None:
    random = np.random.default_rng(5)
    values, seen = random.normal(size=(12, 9)), random.random((12, 9)) < 0.6
    row, column = np.nonzero(seen)
    problem = Completion("noise", "here", observe(12, 9, row, column, values[seen]))
    metrics = problem.measure(solved(BurerMonteiro(), problem, 60))
    assert metrics["objective"] == pytest.approx(least_norm(values, seen), rel=1e-5)
    assert metrics["gap"] <= 1e-5


def test_soft_impute_comes_to_the_norm_as_its_penalty_falls() -> None:
    problem = drawn(0.5)
    best = problem.measure(solved(BurerMonteiro(rank=6), problem, 40))["objective"]
    norms = []
    for penalty in (2e-2, 1e-2):
        answer = solved(SoftImpute(rank=10, penalty=penalty), problem, 500, 0.0)
        norms.append(float(np.linalg.norm(answer["left"] @ answer["right"].T, "nuc")))
    assert norms[0] < norms[1] < best
    assert 2 * norms[1] - norms[0] == pytest.approx(best, rel=1e-3)  # the norm is linear in a small penalty


def test_a_ball_of_the_norm_has_the_entries_and_a_smaller_one_is_proved_not_to() -> None:
    problem = drawn(0.5)
    best = problem.measure(solved(BurerMonteiro(rank=6), problem, 40))["objective"]
    smaller, whole_ball = (
        problem.measure(solved(InFaceFrankWolfe(radius=share * best), problem, 150)) for share in (0.9, 1.0)
    )
    assert smaller["objective"] - smaller["gap"] > 0.01
    assert whole_ball["objective"] < 0.001


def test_held_out_entries_have_a_relative_error() -> None:
    full = drawn(1.0)
    assert isinstance(full.truth, tuple)
    keys = np.random.default_rng(2).permutation(3000)
    kept, out = np.sort(keys[:1500]), keys[1500:]
    held = HeldOut(out // 50, out % 50, full.observed.values[out])
    problem = Completion("x", "here", observed_at(60, 50, kept, full.observed.values[kept]), held_out=held)
    metrics = problem.measure(solved(BurerMonteiro(rank=6), problem, 40))
    assert metrics["test.unseen_error"] <= 1e-6
    assert metrics["test.rmse"] == pytest.approx(
        metrics["test.unseen_error"] * float(np.sqrt(np.mean(held.value**2))), rel=1e-9
    )
