"""Theorem D.3: the constant of its bound, and runs below it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from narrowcast_papers.colr.bound import (
    DIMENSION,
    RANKS,
    Basis,
    Convergence,
    ErrorCurve,
    draw_bases,
    error_factor,
    judge_bound,
    measure_convergence,
    measure_error,
    plot_bound,
)


@pytest.mark.parametrize("basis", ["gaussian", "orthonormal"])
@pytest.mark.parametrize("rank", [1, 4, 16])
def test_the_constant_is_the_expected_error_of_a_projection(basis: Basis, rank: int) -> None:
    random = np.random.default_rng(rank)
    bases = draw_bases(random, 20_000, rank, basis)
    v = random.standard_normal(DIMENSION)
    projected = np.einsum("ndr,ner,e->nd", bases, bases, v, optimize=True)
    errors = np.sum((projected - v) ** 2, axis=1) / np.sum(v**2)
    expected = error_factor(basis, DIMENSION, rank)
    assert errors.mean() == pytest.approx(expected, rel=0.03, abs=1e-12)
    assert projected.mean(axis=0) == pytest.approx(v, abs=0.2), "the projection is unbiased"


@pytest.mark.parametrize("rank", RANKS)
def test_a_basis_per_client_keeps_the_bound_and_one_for_all_has_its_own_error(rank: int) -> None:
    curve = measure_error(rank)
    assert (curve.independent < curve.bound).all()
    assert curve.shared == pytest.approx(error_factor("gaussian", DIMENSION, rank) * curve.mean_update, rel=0.5)
    assert curve.shared.sum() == pytest.approx(
        (error_factor("gaussian", DIMENSION, rank) * curve.mean_update).sum(), rel=0.1
    )
    assert curve.shared[0] > curve.independent[0], "errors of one basis do not average out"


@pytest.mark.parametrize("basis", ["gaussian", "orthonormal"])
def test_the_loss_falls_as_fast_as_the_bound(basis: Basis) -> None:
    each = measure_convergence(4, basis)
    assert (each.measured <= each.bound * (1 + 1e-9)).all()
    assert each.measured[-1] < 0.1 * each.measured[0]
    assert each.bound[-1] < 0.9 * each.bound[0]


def test_what_is_above_its_bound_is_said_to_be_so(tmp_path: Path) -> None:
    one, two = np.array([1.0, 2.0]), np.array([2.0, 1.5])
    errors = {1: ErrorCurve([10, 20], one, one / 4, two, one)}
    convergence = {1: Convergence(np.array([1.0, 0.5]), np.array([1.0, 0.4]))}
    assert [row.verdict for row in judge_bound(errors, convergence)] == [
        "above it in 1 of 2 rounds",
        "below it in all rounds",
        "up to 1.25 of the bound",
    ]
    plot_bound(errors, convergence, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
