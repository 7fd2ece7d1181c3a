"""Products on observed entries against dense ones, on any number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from narrowcast.platform.errors import UserError
from narrowcast.solves import observed as module
from narrowcast.solves.observed import ObservedMatrix, difference, leading, observe, random_block


def drawn(rows: int, columns: int, share: float = 0.3, seed: int = 0) -> tuple[ObservedMatrix, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    mask = random.random((rows, columns)) < share
    dense = random.standard_normal((rows, columns))
    order = random.permutation(mask.sum())
    row, column = (each[order] for each in np.nonzero(mask))
    return observe(rows, columns, row, column, dense[row, column]), dense, mask


@pytest.mark.parametrize(("rows", "columns", "rank"), [(7, 5, 1), (40, 90, 3), (130, 700, 8), (300, 260, 260)])
def test_products_equal_dense_ones(rows: int, columns: int, rank: int) -> None:
    observed, dense, mask = drawn(rows, columns)
    random = np.random.default_rng(1)
    left, right = random.standard_normal((rows, rank)), random.standard_normal((columns, rank))
    product, sparse = left @ right.T, np.where(mask, dense, 0)
    at = np.nonzero(mask)
    assert np.allclose(observed.values, dense[at], rtol=0, atol=0)
    assert np.allclose(observed.sampled(left, right), product[at], rtol=1e-12, atol=1e-11)
    assert np.allclose(observed.residual(left, right), (dense - product)[at], rtol=1e-12, atol=1e-11)
    assert np.allclose(observed.times(observed.values, right), sparse @ right, rtol=1e-12, atol=1e-11)
    assert np.allclose(observed.transposed_times(observed.values, left), sparse.T @ left, rtol=1e-12, atol=1e-11)
    turned = observed.transposed
    assert np.array_equal(turned.values, dense.T[np.nonzero(mask.T)]) and turned.columns == rows
    assert np.array_equal(observed.row_of_entries(), at[0])


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    observed, _, _ = drawn(233, 317)
    random = np.random.default_rng(2)
    left, right = random.standard_normal((233, 9)), random.standard_normal((317, 9))
    monkeypatch.setattr(module, "_WORTH_A_THREAD", 1)
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        found.append(
            [
                observed.sampled(left, right),
                observed.times(observed.values, right),
                observed.transposed_times(observed.values, left),
                observed.row_fits(observed.values, right),
            ]
        )
    for others in found[1:]:
        assert all(np.array_equal(one, other) for one, other in zip(found[0], others, strict=True))


def test_row_fits_are_least_squares() -> None:
    observed, dense, mask = drawn(20, 30, 0.5)
    right = np.random.default_rng(3).standard_normal((30, 4))
    found = observed.row_fits(observed.values, right)
    for i in range(20):
        assert np.allclose(found[i], np.linalg.lstsq(right[mask[i]], dense[i, mask[i]])[0], rtol=1e-10)


def test_rows_without_entries_are_left_as_they_are() -> None:
    observed = observe(4, 3, [2], [1], [5.0])
    assert np.array_equal(observed.row_fits(observed.values, np.ones((3, 2)))[[0, 1, 3]], np.zeros((3, 2)))
    assert np.array_equal(observed.times(observed.values, np.ones((3, 1)))[:, 0], [0, 0, 5, 0])


def test_differences_of_low_rank_keep_their_digits() -> None:
    random = np.random.default_rng(4)
    left, right = random.standard_normal((50, 3)), random.standard_normal((40, 3))
    moved = left + 1e-13 * random.standard_normal((50, 3))
    exact = np.linalg.norm((moved - left) @ right.T)
    assert difference(moved, right, left, right) == pytest.approx(exact, rel=0.05)


def test_leading_triples_of_low_rank_and_sparse() -> None:
    observed, dense, mask = drawn(60, 50)
    random = np.random.default_rng(5)
    left, right = random.standard_normal((60, 3)), random.standard_normal((50, 3))
    whole = np.where(mask, dense, 0) + left @ right.T
    u, s, v = leading(observed, observed.values, 3, random_block(observed, 3, seed=0), 40, (left, right))
    assert np.allclose(s, np.linalg.svd(whole, compute_uv=False)[:3], rtol=1e-9)
    assert np.allclose(whole @ v, u * s, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "columns", "values", "said"),
    [
        ([0, 1], [0, 1], [1.0, np.nan], "the entry in row 1, column 1 is nan; omit entries that are not known"),
        ([0, 0], [1, 1], [1.0, 2.0], "the entry in row 0, column 1 is given twice; keep one of them"),
        ([3], [0], [1.0], "an entry is in row 3, but rows are 0 to 2"),
        ([0], [-1], [1.0], "an entry is in column -1, but columns are 0 to 3"),
        ([], [], [], "the matrix has no observed entry; give at least one"),
    ],
)
def test_entries_that_cannot_be_used_are_named(
    rows: list[int], columns: list[int], values: list[float], said: str
) -> None:
    with pytest.raises(UserError, match="^" + said.replace("(", r"\(")):
        observe(3, 4, rows, columns, values)
