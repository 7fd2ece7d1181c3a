"""Completion problems: what they draw and read, and their metrics."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from narrowcast.algorithms.completion.completion import Completion
from narrowcast.algorithms.completion.synthetic_completion import SyntheticCompletion
from narrowcast.platform.errors import UserError


@pytest.mark.parametrize(("rank", "condition"), [(1, 5), (2, 200), (6, 20000)])
def test_synthetic_matrices_have_their_rank_condition_and_count(rank: int, condition: float) -> None:
    problem = SyntheticCompletion(rows=50, columns=70, rank=rank, fraction=0.123, condition=condition).load()
    assert isinstance(problem.truth, tuple)
    whole = problem.truth[0] @ problem.truth[1].T
    s = np.linalg.svd(whole, compute_uv=False)
    expected = condition * np.exp(-np.log(condition) * np.arange(rank) / max(rank - 1, 1))
    assert np.allclose(s[:rank], expected, rtol=1e-9) and s[rank] < 1e-10 * condition
    observed = problem.observed
    assert observed.count == round(0.123 * 50 * 70) == problem.sizes["observed"]
    assert np.allclose(observed.values, whole[observed.row_of_entries(), observed.indices], atol=1e-9)
    assert (
        problem.digest
        == SyntheticCompletion(rows=50, columns=70, rank=rank, fraction=0.123, condition=condition, seed=0)
        .load()
        .digest
    )


def test_symmetric_problems_are_observed_with_their_mirror_images() -> None:
    problem = SyntheticCompletion(rows=40, rank=3, fraction=0.3, symmetric=True).load()
    observed, turned = problem.observed, problem.observed.transposed
    assert np.array_equal(observed.indices, turned.indices) and np.allclose(observed.values, turned.values)
    assert abs(observed.count - 480) <= 20
    whole = SyntheticCompletion(rows=10, rank=2, fraction=1, symmetric=True).load().observed
    assert whole.count == 100


def test_metrics_are_those_of_the_dense_matrices() -> None:
    problem = SyntheticCompletion(rows=30, columns=20, rank=2, fraction=0.4).load()
    assert isinstance(problem.truth, tuple)
    whole = problem.truth[0] @ problem.truth[1].T
    random = np.random.default_rng(0)
    left, right = random.standard_normal((30, 2)), random.standard_normal((20, 2))
    error = left @ right.T - whole
    seen = np.zeros((30, 20), dtype=bool)
    seen[problem.observed.row_of_entries(), problem.observed.indices] = True
    found = problem.measure({"left": left, "right": right})
    assert found == pytest.approx(
        {
            "residual": np.linalg.norm(error[seen]) / np.linalg.norm(whole[seen]),
            "test.relative_error": np.linalg.norm(error) / np.linalg.norm(whole),
            "test.unseen_error": np.linalg.norm(error[~seen]) / np.linalg.norm(whole[~seen]),
            "test.column_sum_error": np.linalg.norm(error.sum(axis=0)),
        }
    )
    dense = Completion("dense", "here", problem.observed, truth=whole).measure({"left": left, "right": right})
    assert dense == pytest.approx(found)


def test_noise_is_relative_to_the_entries() -> None:
    exact, noisy = (SyntheticCompletion(rows=200, noise=noise).load().observed.values for noise in (0, 0.5))
    assert np.std(noisy - exact) == pytest.approx(0.5 * np.sqrt(np.mean(exact**2)), rel=0.05)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rows": 10, "rank": 11}, "rank is 11, but a 10 x 10 matrix has rank at most its least side"),
        ({"rows": 10**6, "rank": 1}, "at most 1000000000 is allowed"),
        ({"rows": 10, "columns": 9, "symmetric": True}, "symmetric needs as many columns as rows"),
    ],
)
def test_synthetic_problems_that_cannot_be_are_refused(fields: dict[str, int], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        SyntheticCompletion.model_validate(fields)


def test_a_share_that_leaves_no_entry_is_refused() -> None:
    with pytest.raises(UserError, match=r"^fraction is 0.001, which leaves no entry of 5 x 5; raise it$"):
        SyntheticCompletion(rows=5, rank=1, fraction=0.001).load()
