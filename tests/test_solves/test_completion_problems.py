"""Completion problems: what they draw and read, and their metrics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from narrowcast.platform.data.rating_matrix import ExplicitRatings
from narrowcast.platform.errors import UserError
from narrowcast.solves.alternating import ALS
from narrowcast.solves.completion_problems import (
    Completion,
    EntryCompletion,
    ImageCompletion,
    RatingCompletion,
    SyntheticCompletion,
)
from narrowcast.solves.descent import ScaledASD
from narrowcast.solves.thresholding import SoftImpute


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


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.5])
def test_metrics_are_those_of_the_dense_matrices(noise: float) -> None:
    """The observed error is that of the noisy values, all others are those of the matrix without noise."""
    problem = SyntheticCompletion(rows=30, columns=20, rank=2, fraction=0.4, noise=noise).load()
    assert isinstance(problem.truth, tuple)
    whole = problem.truth[0] @ problem.truth[1].T
    random = np.random.default_rng(0)
    left, right = random.standard_normal((30, 2)), random.standard_normal((20, 2))
    error = left @ right.T - whole
    seen = np.zeros((30, 20), dtype=bool)
    seen[problem.observed.row_of_entries(), problem.observed.indices] = True
    found = problem.measure({"left": left, "right": right})
    values = problem.observed.values
    assert found == pytest.approx(
        {
            "observed_error": np.linalg.norm((left @ right.T)[seen] - values) / np.linalg.norm(values),
            "test.relative_error": np.linalg.norm(error) / np.linalg.norm(whole),
            "test.unseen_error": np.linalg.norm(error[~seen]) / np.linalg.norm(whole[~seen]),
            "test.column_sum_error": np.linalg.norm(error.sum(axis=0)),
        }
    )
    dense = Completion("dense", "here", problem.observed, truth=whole).measure({"left": left, "right": right})
    assert dense == pytest.approx(found)


@pytest.mark.parametrize("noise", [0.01, 0.5])
def test_a_fit_of_the_noise_is_not_an_error_of_zero_on_unseen_entries(noise: float) -> None:
    problem = SyntheticCompletion(rows=120, columns=90, rank=3, fraction=0.4, noise=noise).load()
    assert isinstance(problem.truth, tuple)
    solver = ScaledASD()
    state = solver.init(problem, 0)
    for _ in range(200):
        state, _ = solver.step(problem, state)
    answer = solver.answer(state)
    whole, seen = problem.truth[0] @ problem.truth[1].T, np.zeros((120, 90), dtype=bool)
    seen[problem.observed.row_of_entries(), problem.observed.indices] = True
    wanted = np.linalg.norm((answer["left"] @ answer["right"].T - whole)[~seen]) / np.linalg.norm(whole[~seen])
    assert problem.measure(answer)["test.unseen_error"] == pytest.approx(wanted, rel=1e-9)
    assert 0.3 * noise < wanted < noise


def test_a_matrix_that_is_observed_whole_has_no_unseen_error() -> None:
    problem = SyntheticCompletion(rows=9, columns=7, rank=2, fraction=1, noise=0.1).load()
    found = problem.measure({"left": np.zeros((9, 1)), "right": np.zeros((7, 1))})
    assert "test.unseen_error" not in found and found["test.relative_error"] == pytest.approx(1)


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


def test_a_picture_is_observed_in_part_and_measured_as_a_whole() -> None:
    problem = ImageCompletion().load()
    assert problem.sizes == {"rows": 427, "columns": 640, "observed": round(0.3 * 427 * 640)}
    solver = SoftImpute(rank=20, penalty=0.005, decay=0.5)
    state = solver.init(problem, 0)
    for _ in range(15):
        state, _ = solver.step(problem, state)
    answer = solver.answer(state)
    found = problem.measure(answer)
    assert isinstance(problem.truth, np.ndarray)
    mse = np.mean((answer["left"] @ answer["right"].T - problem.truth) ** 2)
    assert found["test.psnr"] == pytest.approx(-10 * np.log10(mse)) and found["test.psnr"] > 18


def test_ratings_are_completed_better_than_by_the_means_of_items() -> None:
    problem = RatingCompletion().load()
    assert problem.sizes == {"rows": 1682, "columns": 943, "observed": 80_000} and problem.held_out is not None
    solver = SoftImpute(rank=12, penalty=0.15)
    state = solver.init(problem, 0)
    for _ in range(12):
        state, _ = solver.step(problem, state)
    rmse = problem.measure(solver.answer(state))["test.rmse"]
    observed, test = problem.observed, problem.held_out
    counts = np.diff(observed.indptr)
    means = np.bincount(observed.row_of_entries(), observed.values, 1682) / np.maximum(counts, 1) + problem.offset
    assert rmse < np.sqrt(np.mean((means[test.row] - test.value) ** 2)) - 0.02
    assert problem.bounds == (1, 5)
    nothing = {"left": np.zeros((1682, 1)), "right": np.zeros((943, 1))}
    assert problem.measure(nothing)["test.rmse"] == pytest.approx(np.sqrt(np.mean((problem.offset - test.value) ** 2)))


def test_a_ridge_chosen_on_validation_ratings_beats_plain_least_squares() -> None:
    ratings = ExplicitRatings(set="ml-100k", validation_share=0.1)
    problem = RatingCompletion(ratings=ratings).load()
    matrix = ratings.model_copy(update={"seed": 0}).load()
    assert problem.observed.count == 70_000
    found = {}
    for weight_decay in (0.0, 0.15):
        solver = ALS(rank=10, weight_decay=weight_decay)
        state = solver.init(problem, 0)
        for _ in range(8):
            state, _ = solver.step(problem, state)
        answer = solver.answer(state)
        found[weight_decay] = problem.measure(answer)
        held = matrix.part("validation")
        predicted = (answer["left"][held.items] * answer["right"][held.users]).sum(axis=1) + matrix.training_mean
        rmse = np.sqrt(np.mean((predicted.clip(1, 5) - held.values) ** 2))
        assert found[weight_decay]["validation.rmse"] == pytest.approx(rmse)
    assert found[0.15]["validation.rmse"] < found[0.0]["validation.rmse"] - 0.1


def test_biases_are_the_solution_of_their_normal_equations() -> None:
    problem = RatingCompletion(bias_decay=5).load()
    plain, observed, test = RatingCompletion().load(), problem.observed, problem.held_out
    assert problem.biases is not None and test is not None
    of_items, of_users = problem.biases
    row, column = observed.row_of_entries(), observed.indices
    assert np.allclose(observed.values, plain.observed.values - of_items[row] - of_users[column])
    for biases, index in ((of_items, row), (of_users, column)):
        assert np.allclose(np.bincount(index, observed.values, len(biases)), 5 * biases, atol=1e-6)
    nothing = {"left": np.zeros((1682, 1)), "right": np.zeros((943, 1))}
    predicted = problem.offset + of_items[test.row] + of_users[test.column]
    rmse = np.sqrt(np.mean((predicted.clip(1, 5) - test.value) ** 2))
    assert problem.measure(nothing)["test.rmse"] == pytest.approx(rmse)
    assert rmse < plain.measure(nothing)["test.rmse"] - 0.1


def test_errors_of_the_ratings_name_the_keys_of_a_solve(tmp_path: Path) -> None:
    path = tmp_path / "stars.csv"
    path.write_text("user,film,rating\n1,1,5\n1,2,4\n")
    renamed = ExplicitRatings(path=path, time=None)
    with pytest.raises(UserError, match=r"no column 'item', .*; name the column with problem\.ratings\.item=COLUMN$"):
        RatingCompletion(ratings=renamed).load()
    few = ExplicitRatings(path=path, item="film", time=None, min_ratings=3)
    with pytest.raises(UserError, match=r"no user has 3 ratings .*; lower problem\.ratings\.min_ratings$"):
        RatingCompletion(ratings=few).load()


def test_the_seed_of_ratings_is_their_own_or_that_of_the_problem() -> None:
    own = ExplicitRatings(set="ml-100k", seed=4)
    one, two = (RatingCompletion(ratings=own, seed=seed).load().digest for seed in (0, 1))
    assert one == two == RatingCompletion(seed=4).load().digest != RatingCompletion(seed=5).load().digest


@pytest.mark.parametrize("suffix", [".csv", ".npz"])
def test_entries_of_ones_own_are_read_from_tables_and_arrays(tmp_path: Path, suffix: str) -> None:
    row, column, value = np.arange(10), np.arange(10) * 3 % 7, np.arange(10) / 4
    path = tmp_path / f"mine{suffix}"
    if suffix == ".npz":
        np.savez(path, row=row, column=column, value=value)
    else:
        lines = "".join(f"{r},{c},{v}\n" for r, c, v in zip(row, column, value, strict=True))
        path.write_text("row,column,value\n" + lines)
    problem = EntryCompletion(path=path, columns=9, test_share=0.2).load()
    assert problem.sizes == {"rows": 10, "columns": 9, "observed": 8} and problem.held_out is not None
    assert sorted([*problem.observed.values, *problem.held_out.value]) == pytest.approx(value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("row,column,value\n0,1,2\n0,1,3\n", r"the entry in row 0, column 1 is given twice; keep one of them$"),
        ("row,column,value\n0,1,nan\n", r"row 2 has no number in column value"),
        ("row,column,value\n0,-1,2\n", r"entry 0 has the column -1.0; columns are whole numbers from 0 to 9999999$"),
        ("row,column,value\n0.5,1,2\n", r"entry 0 has the row 0.5; rows are whole numbers"),
        ("row,column,value\n", r"the matrix has no observed entry; give at least one$"),
        (
            "row,value\n1,2\n",
            r"has no column 'column', only row, value; give the columns these names, with commas between them$",
        ),
        ("row,column,value\n9,1,2\n", r"an entry is in row 9, but rows are 0 to 4$"),
    ],
)
def test_files_that_cannot_be_used_are_refused_in_one_line(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(content)
    with pytest.raises(UserError, match=said) as error:
        EntryCompletion(path=path, rows=5).load()
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_files_that_are_no_matrix_and_no_picture_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    path.write_text("no archive")
    with pytest.raises(UserError, match=r"is not a \.npz file; write row, column and value with numpy\.savez$"):
        EntryCompletion(path=path).load()
    np.savez(path, row=np.arange(3), column=np.arange(3), value=np.eye(3))
    with pytest.raises(UserError, match=r"value float64 \(3, 3\); give three lists of numbers of one length$"):
        EntryCompletion(path=path).load()
    np.save(array := tmp_path / "mine.npy", np.eye(3))
    with pytest.raises(UserError, match=r"no table of entries by its name; give a file that ends in \.csv, \.tsv, "):
        EntryCompletion(path=array).load()
    with pytest.raises(UserError, match=r"^problem\.path = none\.csv does not exist"):
        EntryCompletion(path=Path("none.csv")).load()
    with pytest.raises(UserError, match=r"is not a readable image .*; replace the file$"):
        ImageCompletion(path=path).load()
    picture = tmp_path / "one.png"
    Image.fromarray(np.zeros((1, 1), dtype=np.uint8)).save(picture)
    with pytest.raises(UserError, match=r"fraction is 0\.3, which leaves no pixel"):
        ImageCompletion(path=picture).load()
