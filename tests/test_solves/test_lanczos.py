"""Lanczos against dense eigenvalues."""

from __future__ import annotations

import numpy as np
import pytest

from narrowcast.solves.nuclear_norm import leading_eigenpair


@pytest.mark.parametrize("size", [1, 2, 5, 60])
def test_the_pair_is_that_of_a_dense_matrix(size: int) -> None:
    random = np.random.default_rng(size)
    matrix = random.standard_normal((size, size))
    matrix = matrix + matrix.T
    found = leading_eigenpair(lambda x: matrix @ x, random.standard_normal(size), 1e-12, 200)
    values, vectors = np.linalg.eigh(matrix)
    assert found.value == pytest.approx(values[-1], rel=1e-11)
    assert abs(found.vector @ vectors[:, -1]) == pytest.approx(1, abs=1e-9)
    assert found.above >= values[-1] - 1e-12 * abs(values).max()


def test_an_early_end_says_how_far_off_it_is() -> None:
    matrix = np.diag(np.linspace(-3, 1, 400))
    found = leading_eigenpair(lambda x: matrix @ x, np.random.default_rng(0).standard_normal(400), 1e-12, 12)
    true = np.linalg.norm(matrix @ found.vector - found.value * found.vector)
    assert found.residual == pytest.approx(true, rel=1e-6)
    assert found.value < 1 <= found.above


def test_an_invariant_space_ends_it() -> None:
    matrix = np.diag([1.0, 1.0, 1.0, -2.0])
    found = leading_eigenpair(lambda x: matrix @ x, np.ones(4), 1e-15, 4)
    assert found.value == pytest.approx(1, abs=1e-14)
    zero = leading_eigenpair(lambda x: 0 * x, np.ones(4), 1e-15, 4)
    assert (zero.value, zero.residual) == (0.0, 0.0)
