"""Completion solvers: their updates against dense references, easy problems to the end, exact resumption."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

import dense_completion
from narrowcast.platform.errors import UserError
from narrowcast.platform.solving import Solver, StepResult
from narrowcast.platform.types import Arrays
from narrowcast.solves.alternating import ALS, LMaFit, PowerFactorisation
from narrowcast.solves.completion_problems import Completion, SyntheticCompletion
from narrowcast.solves.descent import AFGD, ASD, FGD, ScaledASD, ScaledGD, projected
from narrowcast.solves.factor_solver import PATIENCE, PROGRESS, ROUNDING, Continuation, FactorSolver, progress
from narrowcast.solves.observed import observe, truncated
from narrowcast.solves.second_order import R3MC, GaussNewton, MatrixIRLS
from narrowcast.solves.thresholding import ALPS, CGIHT, NIHT, SoftImpute
from sampling import sampled

SOLVERS: list[Any] = [
    FGD(),
    AFGD(),
    ASD(),
    ScaledASD(),
    ScaledGD(),
    LMaFit(),
    PowerFactorisation(),
    ALS(),
    GaussNewton(),
    NIHT(),
    CGIHT(),
    ALPS(),
    R3MC(),
    MatrixIRLS(),
    SoftImpute(),
]
EXACT = {
    "gauss_newton": {"inner_iterations": 3000, "inner_tolerance": 1e-13},
    "matrix_irls": {"inner_iterations": 3000, "inner_tolerance": 1e-13, "passes": 60},
    **{kind: {"passes": 60} for kind in ("niht", "cgiht", "alps", "soft_impute")},
}
"""Fields with which the iterations are solved to the end, as in the references."""


def solve(solver: Solver, problem: Completion, iterations: int, tolerance: float = 0.0) -> tuple[Arrays, StepResult]:
    state, report = solver.init(problem, 0), StepResult(np.inf)
    for _ in range(iterations):
        state, report = solver.step(problem, state)
        if report.status != "running" or report.residual <= tolerance:
            break
    return state, report


@pytest.fixture(scope="module")
def easy() -> Completion:
    return SyntheticCompletion(rows=60, columns=80, rank=3, fraction=0.5, condition=3).load()


@pytest.fixture(scope="module")
def small() -> Completion:
    return SyntheticCompletion(rows=30, columns=40, rank=2, fraction=0.6, condition=3).load()


each_solver = pytest.mark.parametrize("solver", SOLVERS, ids=lambda each: each.kind)


EXACT_ON_LOW_RANK = [ALS(weight_decay=0), *(each for each in SOLVERS if each.kind not in ("soft_impute", "als"))]


@pytest.mark.parametrize("solver", EXACT_ON_LOW_RANK, ids=lambda each: each.kind)
def test_every_solver_solves_an_easy_problem(solver: Any, easy: Completion) -> None:
    state, report = solve(solver, easy, 600, 1e-10)
    found = easy.measure(solver.answer(state))
    assert found["test.relative_error"] < 1e-8 and found["test.unseen_error"] < 1e-8
    assert report.status == "running" and report.residual == pytest.approx(found["observed_error"], rel=1e-2)


@each_solver
def test_a_state_that_is_written_and_read_goes_on_to_the_same_answer(solver: Any, easy: Completion) -> None:
    straight, _ = solve(solver, easy, 8)
    file = io.BytesIO()
    np.savez(file, **solve(solver, easy, 4)[0])
    file.seek(0)
    state: Arrays = {name: np.asarray(values, order="C") for name, values in np.load(file).items()}
    for _ in range(4):
        state, _ = solver.step(easy, state)
    answer, other = solver.answer(straight), solver.answer(state)
    assert all(np.array_equal(answer[name], other[name]) for name in ("left", "right"))


@each_solver
def test_iterations_are_those_of_the_dense_reference(solver: Any, small: Completion) -> None:
    solver = solver.model_copy(update=EXACT.get(solver.kind, {}))
    assert isinstance(small.truth, tuple)
    whole, mask = small.truth[0] @ small.truth[1].T, np.zeros((30, 40))
    mask[small.observed.row_of_entries(), small.observed.indices] = 1
    state = solver.init(small, 0)
    known = {"smoothing": float(state["smoothing"])} if solver.kind == "matrix_irls" else {}
    answer = solver.answer(state) if solver.kind != "soft_impute" else solver.start(small, 2, 0)
    left, right = answer.values() if isinstance(answer, dict) else answer
    reference = getattr(dense_completion, solver.kind)(whole, mask, left, right, **known)
    for _ in range(4):
        expected = next(reference)
        state, _ = solver.step(small, state)
        answer = solver.answer(state)
        assert np.abs(answer["left"] @ answer["right"].T - expected).max() < 1e-10 * np.abs(expected).max()


@each_solver
@pytest.mark.parametrize(
    ("value", "phrase"),
    [
        (0.0, "^the observed entries of own are all 0, which leaves nothing to fit$"),
        (
            1e308,
            r"^the largest observed entry of own is 1e\+308, whose squares are out of range; scale the entries to",
        ),
        (1e-200, "^the largest observed entry of own is 1e-200, whose squares are out of range"),
    ],
)
def test_values_that_no_solver_can_fit_are_refused(solver: Any, value: float, phrase: str) -> None:
    problem = Completion("own", "", observe(3, 3, [0, 1], [0, 2], [value, -value]))
    with pytest.raises(UserError, match=phrase):
        solver.model_copy(update={"rank": 1}).init(problem, 0)


@pytest.mark.parametrize("solver", [ASD(), ScaledASD(), PowerFactorisation(), GaussNewton()], ids=lambda e: e.kind)
def test_exact_steps_never_raise_the_residual(solver: FactorSolver, easy: Completion) -> None:
    state, residuals = solver.init(easy, 0), [1.0]
    for _ in range(15):
        state, report = solver.step(easy, state)
        residuals.append(report.residual)
    assert (np.diff(residuals) <= 1e-15).all()


def best_fit(problem: Completion, rank: int) -> float:
    """Return the least residual of a rank over six starts of alternating least squares, each row by itself."""
    observed, least = problem.observed, np.inf
    mask = np.zeros((observed.rows, observed.columns), dtype=bool)
    mask[observed.row_of_entries(), observed.indices] = True
    values = np.zeros(mask.shape)
    values[mask] = observed.values
    for seed in range(6):
        right = np.random.default_rng(seed).standard_normal((observed.columns, rank))
        for _ in range(150):
            left = np.stack([np.linalg.lstsq(right[m], v[m])[0] for m, v in zip(mask, values, strict=True)])
            right = np.stack([np.linalg.lstsq(left[m], v[m])[0] for m, v in zip(mask.T, values.T, strict=True)])
        least = min(least, float(np.linalg.norm((left @ right.T - values)[mask])))
    return least


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "noise"), sampled([(1, 0.0), (2, 0.0), (2, 0.2), (3, 0.2)], [(1, 0.0), (2, 0.2)]))
def test_solvers_end_at_the_best_fit_of_a_rank_that_leaves_a_residual(rank: int, noise: float) -> None:
    problem = SyntheticCompletion(rows=60, columns=40, rank=3, fraction=0.5, condition=2, noise=noise, seed=3).load()
    least = best_fit(problem, rank)
    for solver in (ScaledASD(rank=rank), NIHT(rank=rank), CGIHT(rank=rank), ALPS(rank=rank), R3MC(rank=rank)):
        state, _ = solve(solver, problem, 600)
        answer = solver.answer(state)
        assert answer["left"].shape == (60, rank) and answer["right"].shape == (40, rank)
        assert np.linalg.norm(problem.observed.residual(**answer)) == pytest.approx(least, rel=1e-6), solver.kind


@pytest.mark.parametrize("solver", [NIHT(), CGIHT()], ids=lambda each: each.kind)
def test_thresholding_never_leads_away_from_the_data(solver: FactorSolver) -> None:
    sparse = SyntheticCompletion(rows=300, rank=2, fraction=0.06, condition=2, seed=1).load()
    state, norms = solver.init(sparse, 0), list[float]()
    for _ in range(60):
        norms.append(float(np.linalg.norm(sparse.observed.residual(**solver.answer(state)))))
        state, _ = solver.step(sparse, state)
    assert (np.diff(norms) <= 1e-12 * norms[0]).all()
    assert norms[-1] < 0.3 * sparse.observed.norm < norms[0]


@pytest.mark.parametrize("solver", [FGD, AFGD])
def test_factors_of_positive_semidefinite_matrices_are_one(solver: type[FGD | AFGD], easy: Completion) -> None:
    problem = SyntheticCompletion(rows=70, rank=3, fraction=0.5, symmetric=True).load()
    state, _ = solve(solver(form="psd"), problem, 400, 1e-10)
    answer = solver().answer(state)
    assert problem.measure(answer)["test.relative_error"] < 1e-8 and np.array_equal(answer["left"], answer["right"])
    with pytest.raises(UserError, match=r'^synthetic_completion is not symmetric; use form "rectangular"'):
        solver(form="psd").check(easy)


def test_the_projection_of_accelerated_descent_is_onto_its_set() -> None:
    random = np.random.default_rng(0)
    origin, v = random.standard_normal((20, 3)), random.standard_normal((20, 3))
    product = origin.T @ projected(v, origin)
    assert np.allclose(product, product.T) and np.linalg.eigvalsh(product).min() > -1e-12
    assert np.allclose(projected(projected(v, origin), origin), projected(v, origin))


def test_soft_impute_ends_where_the_penalised_objective_is_least(small: Completion) -> None:
    state, _ = solve(SoftImpute(rank=12, penalty=0.05, passes=8), small, 250)
    answer, residual = SoftImpute().answer(state), state["residual"]
    penalty = float(state["largest"]) * 0.05
    u, s, v = truncated(answer["left"], answer["right"], 12)
    kept = int((s > 1e-12).sum())
    dense = np.zeros((30, 40))
    dense[small.observed.row_of_entries(), small.observed.indices] = residual / penalty
    assert 0 < kept < 12 and np.linalg.norm(dense, 2) < 1 + 1e-6  # a subgradient of the nuclear norm
    assert np.allclose(u[:, :kept].T @ dense @ v[:, :kept], np.eye(kept), atol=1e-6)


@pytest.mark.parametrize("solver", [ScaledASD, PowerFactorisation, GaussNewton, R3MC, LMaFit])
def test_continuation_solves_what_stalls_without_it(solver: type[FactorSolver]) -> None:
    hard = SyntheticCompletion(rows=300, rank=4, fraction=0.15, condition=1000).load()
    state, _ = solve(solver(continuation=Continuation()), hard, 150, 1e-12)
    assert hard.measure(solver().answer(state))["test.relative_error"] < 1e-9
    if solver is ScaledASD:
        state, _ = solve(solver(), hard, 150, 1e-12)
        assert hard.measure(solver().answer(state))["test.relative_error"] > 1e-2


@pytest.mark.parametrize("solver", [ScaledASD, PowerFactorisation, NIHT, ALPS, R3MC], ids=lambda each: each.__name__)
def test_continuation_ends_at_the_rank_of_the_matrix(solver: type[FactorSolver], easy: Completion) -> None:
    state, report = solve(solver(rank=8, continuation=Continuation()), easy, 400)
    assert report.status == "converged" and report.residual < ROUNDING
    answer = solver().answer(state)
    assert answer["left"].shape == (60, 3) and easy.measure(answer)["test.relative_error"] < 1e-12


@pytest.mark.parametrize(
    ("norms", "last"),
    [
        ([1.0] * (PATIENCE + 1), "stalled"),
        ([1.0] * PATIENCE, "running"),
        ([0.998**n for n in range(300)], "running"),
        ([0.9999**n for n in range(300)], "running"),
        ([1.0, 1e-14] + [1e-14] * PATIENCE, "converged"),
        ([1.0, 1e-16], "converged"),
        ([1.0, np.inf], "diverged"),
        ([1.0, np.nan], "diverged"),
        ([1.0, 2e6], "diverged"),
    ],
)
def test_progress_says_when_a_solver_has_ended(norms: list[float], last: str) -> None:
    state: Arrays = PROGRESS
    for norm in norms:
        status, state = progress(state, norm, 1.0)
    assert status == last


def test_a_rank_above_the_size_and_an_unknown_rank_are_refused() -> None:
    problem = Completion("mine", "here", observe(3, 5, [0, 1], [1, 2], [1.0, 2.0]))
    with pytest.raises(UserError, match=r"^solver.rank is 4, but the matrix is 3 x 5; lower it to 3 or less$"):
        ScaledASD(rank=4).check(problem)
    with pytest.raises(UserError, match=r"^the rank of mine is not known; set solver.rank, 1 to 3$"):
        ScaledASD().init(problem, 0)
    with pytest.raises(UserError, match=r"^\[\] is not a matrix completion problem; choose another solver$"):
        ScaledASD(rank=1).check([])


@each_solver
@pytest.mark.parametrize("entries", [1, 3])
def test_few_entries_and_empty_rows_do_no_harm(solver: Any, entries: int) -> None:
    observed = observe(6, 5, np.arange(entries), np.arange(entries), np.arange(entries) + 2.0)
    problem = Completion("few", "here", observed)
    state, report = solve(solver.model_copy(update={"rank": 2}), problem, 10)
    assert report.residual < 1 if solver.kind not in ("fgd", "afgd") else report.status in ("running", "diverged")
    assert all(np.isfinite(each).all() for each in solver.answer(state).values())
