"""The augmented Lagrangian, its solver, saddle points and the reduction of ranks, against dense references."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize

from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Arrays, FloatArray
from narrowcast.solves.burer_monteiro import AugmentedLagrangian, BurerMonteiro, reduce_rank
from narrowcast.solves.max_cut import RandomMaxCut
from narrowcast.solves.semidefinite import SDPAFile, SemidefiniteProgram, semidefinite_program_of

CUT = RandomMaxCut(vertices=40, edges=120, seed=2, roundings=0)
PENTAGON = """"The theta number of a cycle of five vertices
6 = constraints
1
{5}
(1.0, 0, 0, 0, 0, 0)
""" + "".join(
    [
        *(f"0 1 {i} {j} 1\n" for i in range(1, 6) for j in range(i, 6)),
        *(f"1 1 {i} {i} 1\n" for i in range(1, 6)),
        *(f"{i + 1} 1 {min(i, i % 5 + 1)} {max(i, i % 5 + 1)} 1\n" for i in range(1, 6)),
    ]
)


def pentagon(folder: Path) -> SemidefiniteProgram:
    (folder / "pentagon.dat-s").write_text(PENTAGON)
    return SDPAFile(path=folder / "pentagon.dat-s", proof="factorisation").load()


def solved(solver: BurerMonteiro, problem: Any, iterations: int = 40, residual: float = 1e-7) -> Arrays:
    state = solver.init(problem, 0)
    for _ in range(iterations):
        state, report = solver.step(problem, state)
        if report.residual <= residual or report.status != "running":
            break
    return state


def lagrangian() -> tuple[AugmentedLagrangian, FloatArray, FloatArray]:
    program = CUT.load().program
    random = np.random.default_rng(0)
    dual = random.normal(size=40)
    return AugmentedLagrangian(program, dual, 0.7), random.normal(size=(40, 5)), random.normal(size=(40, 5))


def test_the_lagrangian_is_that_of_dense_matrices_and_its_gradient_that_of_differences() -> None:
    found, vectors, direction = lagrangian()
    value, gradient = found.value_and_gradient(vectors)
    whole, cost = vectors @ vectors.T, found.program.cost.toarray()
    violations = np.diag(whole) - 1
    assert value == pytest.approx(np.sum(cost * whole) - found.dual @ violations + 0.35 * violations @ violations)
    step = 1e-5
    ahead, behind = (found.value_and_gradient(vectors + sign * step * direction)[0] for sign in (1, -1))
    assert float(np.vdot(gradient, direction)) == pytest.approx((ahead - behind) / (2 * step), rel=1e-7)


def test_the_best_step_is_the_least_of_a_fine_grid() -> None:
    found, vectors, direction = lagrangian()
    best = found.best_step(vectors, direction)
    grid = np.linspace(-4, 4, 20_001)
    values = [found.value_and_gradient(vectors + t * direction)[0] for t in grid[::20]]
    assert found.value_and_gradient(vectors + best * direction)[0] <= min(values)
    assert abs(best - grid[::20][int(np.argmin(values))]) <= 8e-3


def test_max_cut_is_solved_as_by_scipy_on_normalised_factors() -> None:
    problem = CUT.load()
    cost = problem.program.cost.toarray()

    def plain(flat: FloatArray) -> tuple[float, FloatArray]:
        raw = flat.reshape(40, 10)
        norms = np.linalg.norm(raw, axis=1, keepdims=True)
        unit = raw / norms
        pulled = 2 * cost @ unit
        tangent = (pulled - np.sum(pulled * unit, axis=1, keepdims=True) * unit) / norms
        return float(np.sum(cost * (unit @ unit.T))), tangent.ravel()

    start = np.random.default_rng(0).normal(size=400)
    reference = minimize(plain, start, jac=True, method="L-BFGS-B", options={"maxiter": 5000, "gtol": 1e-10, "ftol": 0})
    state = solved(BurerMonteiro(), problem)
    metrics = problem.program.measure(BurerMonteiro().answer(state))
    assert metrics["objective"] == pytest.approx(reference.fun, abs=1e-6)
    assert metrics["gap"] <= 1e-6
    assert problem.measure(state)["gap"] <= 1e-6
    slack = problem.program.slack(state["dual"]).toarray()
    least = float(np.linalg.eigvalsh(slack)[0])
    assert least >= -1e-6
    assert metrics["bound"] == pytest.approx(state["dual"].sum() + 40 * min(0.0, least), abs=1e-9)
    assert np.linalg.norm(slack @ state["vectors"]) <= 1e-6


def test_the_theta_number_of_the_pentagon_is_the_root_of_five(tmp_path: Path) -> None:
    problem = pentagon(tmp_path)
    assert problem.sizes == {"side": 5, "constraints": 6}
    assert problem.trace_bound == pytest.approx(1, abs=1e-9)
    metrics = problem.measure(BurerMonteiro().answer(solved(BurerMonteiro(), problem)))
    assert metrics["objective"] == pytest.approx(-math.sqrt(5), abs=1e-6)
    assert metrics["bound"] <= -math.sqrt(5)
    assert metrics["gap"] <= 1e-6
    assert metrics["infeasibility"] <= 1e-7


def test_blocks_stand_along_the_diagonal(tmp_path: Path) -> None:
    rows = "0 1 1 2 -1\n1 1 1 1 1\n1 1 2 2 1\n2 2 1 1 1\n2 2 2 2 2\n0 2 2 2 -3\n"
    (tmp_path / "b.dat-s").write_text(f"* two blocks\n2\n2\n2, -2\n1 4\n{rows}")
    problem = SDPAFile(path=tmp_path / "b.dat-s").load()
    cost = np.zeros((4, 4))
    cost[0, 1] = cost[1, 0] = 1
    cost[3, 3] = 3
    np.testing.assert_array_equal(problem.cost.toarray(), cost)
    whole = np.diag([2.0, 3, 5, 7])
    np.testing.assert_allclose(problem.constraints.of_matrix(whole), [5, 19])
    metrics = problem.measure(BurerMonteiro().answer(solved(BurerMonteiro(), problem)))
    assert metrics["objective"] == pytest.approx(-1, abs=1e-6)  # 2 X_12 >= -tr X_1, and Y_22 may be 0


@pytest.mark.parametrize("perturbation", ["noise", "curvature"])
def test_a_zero_column_is_left_by_perturbation_alone(perturbation: Any) -> None:
    problem = CUT.load()
    plain = solved(BurerMonteiro(start_rank=1), problem)
    assert not plain["vectors"][:, 1:].any()
    stuck = problem.measure(plain)
    assert stuck["rank"] == 1
    assert stuck["gap"] > 0.05
    assert np.linalg.norm(problem.program.slack(plain["dual"]) @ plain["vectors"]) <= 1e-5
    left = problem.measure(solved(BurerMonteiro(start_rank=1, perturbation=perturbation), problem))
    assert left["gap"] <= 1e-6
    assert left["relaxation"] > stuck["relaxation"]


def test_the_determinant_of_a_rank_deficient_factor_has_no_gradient() -> None:
    vectors = np.random.default_rng(0).normal(size=(12, 4))
    vectors[:, 3] = 0
    gram = vectors.T @ vectors
    cofactors = np.array(
        [[(-1) ** (i + j) * np.linalg.det(np.delete(np.delete(gram, i, 0), j, 1)) for j in range(4)] for i in range(4)]
    )
    assert abs(cofactors[3, 3]) > 1
    np.testing.assert_allclose(2 * vectors @ cofactors, 0, atol=1e-9)


@pytest.mark.parametrize(("rank", "wanted"), [(14, 8), (8, 8), (9, 8)])
def test_reduction_keeps_constraints_and_lowers_no_rank_more_than_it_has_to(rank: int, wanted: int) -> None:
    program = CUT.load().program
    vectors = np.random.default_rng(1).normal(size=(40, rank))
    reduced = reduce_rank(program, vectors)
    assert reduced.shape == (40, wanted)
    np.testing.assert_allclose(program.violations(reduced), program.violations(vectors), atol=1e-9)
    assert program.objective(reduced) <= program.objective(vectors) + 1e-9
    if rank * (rank + 1) // 2 > 41:
        assert wanted * (wanted + 1) // 2 <= 40


def test_reduction_of_an_optimum_keeps_its_objective(tmp_path: Path) -> None:
    problem = pentagon(tmp_path)
    state = solved(BurerMonteiro(rank=5, reduce_below=1e-6), problem)
    answer = BurerMonteiro().answer(state)
    assert answer["vectors"].shape[1] <= problem.pataki_rank == 3
    assert problem.objective(answer["vectors"]) == pytest.approx(problem.objective(state["vectors"]), abs=1e-9)
    np.testing.assert_allclose(problem.violations(answer["vectors"]), problem.violations(state["vectors"]), atol=1e-9)
    assert answer["vectors"].shape[1] < state["vectors"].shape[1]


def test_a_solve_goes_on_from_copies_of_its_state_bit_by_bit() -> None:
    problem = CUT.load()
    for perturbation in ("none", "noise", "curvature"):
        solver = BurerMonteiro(perturbation=perturbation, reduce_below=1e-3)
        straight = solved(solver, problem, 9, 0.0)
        state = {name: values.copy() for name, values in solved(solver, problem, 4, 0.0).items()}
        for _ in range(5):
            state, _ = solver.step(problem, state)
        assert straight.keys() == state.keys()
        assert all(np.array_equal(straight[name], state[name]) for name in straight)


def test_ranks_are_checked(caplog: pytest.LogCaptureFixture) -> None:
    BurerMonteiro(rank=2).check(CUT.load())
    BurerMonteiro(rank=2).init(CUT.load(), 0)
    assert caplog.text.count("rank 2 is below 8") == 1  # a command calls both
    with pytest.raises(UserError, match=r"solver.rank is 41, but X is 40 x 40; lower it to 40 or less"):
        BurerMonteiro(rank=41).check(CUT.load())
    with pytest.raises(UserError, match=r"solver.start_rank is 12; lower it to the rank 9"):
        BurerMonteiro(start_rank=12).check(CUT.load())
    with pytest.raises(UserError, match="is not a semidefinite program"):
        semidefinite_program_of(object())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "ends after 0 lines; is the file cut off"),
        ("2\n1\n2\n", "ends after 3 lines; is the file cut off"),
        ("x\n1\n2\n1 1\n", "has a line 'x' in place of a number"),
        ("2\n1\n2\n1\n", "has 1 targets, but its first line says 2 constraints; is it cut off"),
        ("1\n2\n2\n1\n", "has 1 sizes of blocks, but its second line says 2; is it cut off"),
        ("1\n1\n0\n1\n", "has 1 constraints and blocks of 0 rows"),
        ("0\n1\n2\n \n", "ends after 3 lines"),
        ("1\n1\n2\n1\n1 1 1 1 1\n1 1 2\n", "entry 2 is '1 1 2'; is the file cut off"),
        ("1\n1\n2\n1\n1 1 1\n1 1 2 2 1\n", "entry 1 is '1 1 1'; give lines"),
        ("1\n1\n2\n1\n1 1 1 1 one\n", "could not convert string to float"),
        ("1\n1\n2\n1\n1 1 1.5 1 1\n", "invalid literal for int"),
        ("1\n1\n2\n1\n2 1 1 1 1\n", "entry 1 has the matrix 2; 0 to 1 are allowed"),
        ("1\n1\n2\n1\n1 2 1 1 1\n", "entry 1 has the block 2; 1 to 1 are allowed"),
        ("1\n1\n2\n1\n1 1 1 3 1\n", "entry 1 has the column 3; block 1 has 1 to 2"),
        ("1\n1\n-2\n1\n1 1 1 2 1\n", "entry 1 is off the diagonal of block 1, which is diagonal"),
        ("1\n1\n2\n1\n1 1 1 2 1\n1 1 2 1 3\n", r"\(1, 2\) of matrix 1 is 1, but its mirror image 3"),
        ("1\n1\n2\n1\n0 1 1 2 1\n0 1 1 2 1\n1 1 1 1 1\n", r"\(1, 2\) of matrix 0 is given twice"),
        ("2\n1\n2\n1 1\n1 1 1 1 1\n", "constraint 2 has no entries: it says 0 = 1, which nothing satisfies"),
        ("1\n1\n2\n-1\n1 1 1 1 1\n", "constraint 1 asks a sum of diagonal entries to be -1"),
        ("1\n1\n2\nnan\n1 1 1 1 1\n", r"target 1 has the value nan; give finite values of at most 1e\+100$"),
    ],
)
def test_files_that_are_no_programs_are_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.dat-s"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        SDPAFile(path=path).load()
    assert str(caught.value).count(str(path)) == 1
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "rows",
    [
        "2\n1\n2\n1 2\n1 1 1 1 1\n2 1 1 1 1\n0 1 2 2 -1\n",  # X_11 is 1 and 2
        "3\n1\n2\n1 1 3\n1 1 1 1 1\n2 1 2 2 1\n3 1 1 2 1\n0 1 1 2 5\n",  # 2 X_12 is at most 2
    ],
)
def test_constraints_that_nothing_satisfies_together_are_one_line(rows: str, tmp_path: Path) -> None:
    (tmp_path / "x.dat-s").write_text(rows)
    problem = SDPAFile(path=tmp_path / "x.dat-s").load()
    with pytest.raises(UserError, match=r"x: no positive semidefinite matrix of a trace up to .* satisfies") as caught:
        solved(BurerMonteiro(), problem)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "rows",
    [
        "1\n1\n2\n1\n0 1 2 2 1\n1 1 1 1 1\n",  # X_11 is 1, and -X_22 falls for ever
        "1\n1\n2\n1\n0 1 1 2 1\n1 1 1 1 1\n",  # -2 X_12 falls as the root of X_22, along no direction
        "2\n1\n3\n1 1\n0 1 2 3 1\n1 1 1 1 1\n2 1 1 2 0.5\n",
    ],
)
def test_an_unbounded_program_is_one_line(rows: str, tmp_path: Path) -> None:
    (tmp_path / "x.dat-s").write_text(rows)
    problem = SDPAFile(path=tmp_path / "x.dat-s").load()
    with pytest.raises(
        UserError, match=r"^x is unbounded: along a positive semidefinite matrix of trace 1 the"
    ) as said:
        solved(BurerMonteiro(), problem)
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_bounded_program_without_a_bound_on_the_trace_is_solved_and_not_called_unbounded(
    scale: float, tmp_path: Path
) -> None:
    """-2 X_12 + X_22 with X_11 = b is least at X_12 = X_22 = b, where it is -b; y = -1 proves it."""
    rows = f"1\n1\n2\n{scale}\n0 1 1 2 1\n0 1 2 2 -1\n1 1 1 1 1\n"
    (tmp_path / "x.dat-s").write_text(rows)
    problem = SDPAFile(path=tmp_path / "x.dat-s").load()
    assert problem.trace_bound is None
    random = np.random.default_rng(0)
    for size in (1e-9, 1.0, 1e9):
        problem.check_bounded(size * random.normal(size=(2, 2)))
    problem.check_bounded(np.zeros((2, 2)))
    state = solved(BurerMonteiro(), problem)
    assert problem.objective(state["vectors"]) == pytest.approx(-scale, rel=1e-3)


def test_infeasibility_is_proved_for_the_trace_that_is_stated_and_no_larger_one(tmp_path: Path) -> None:
    (tmp_path / "x.dat-s").write_text("2\n1\n2\n1 0.001\n1 1 1 2 1\n2 1 2 2 1\n")
    problem = SDPAFile(path=tmp_path / "x.dat-s").load()  # X_12 = 1/2 and X_22 = 1/1000 need X_11 >= 250
    violations = np.array([-1.0, 250.0])  # <b, v> is -0.75
    least = float(np.linalg.eigvalsh([[0, -1.0], [-1.0, 250.0]])[0])
    problem.check_feasible(violations, 1.01 * -0.75 / least)
    with pytest.raises(UserError, match="constraint 2 is violated most, by 250"):
        problem.check_feasible(violations, 0.99 * -0.75 / least)
    problem.check_feasible(-violations, 1.0)
