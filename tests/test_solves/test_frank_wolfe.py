"""Frank-Wolfe solvers over a nuclear-norm ball: dense references, certified gaps, ranks, resumption, bad input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dense_frank_wolfe import Dense, in_face_iterates
from narrowcast.platform.errors import UserError
from narrowcast.platform.solving import Problem
from narrowcast.platform.types import Arrays
from narrowcast.solves.completion_problems import SyntheticCompletion
from narrowcast.solves.frank_wolfe import InFaceFrankWolfe, ThinSVD
from narrowcast.solves.hazan import Hazan
from narrowcast.solves.max_cut import RandomMaxCut
from narrowcast.solves.nuclear_norm import radius_of

SMALL = SyntheticCompletion(rows=14, columns=11, rank=3, fraction=0.6, condition=3, noise=0.3, seed=1).load()
EXACT = {"eigen_tolerance": 1e-14, "eigen_products": 400}
RADIUS = 4.0
NEVER = math.inf


def run(solver: Any, problem: Any, iterations: int) -> Arrays:
    state = solver.init(problem, 0)
    for _ in range(iterations):
        state, _ = solver.step(problem, state)
    return state


def whole(answer: Arrays) -> Any:
    return answer["left"] @ answer["right"].T


@pytest.mark.parametrize(("full", "partial"), [(0.0, NEVER), (0.0, 1.0), (1.0, 1.0), (NEVER, NEVER)])
def test_in_face_steps_are_those_of_dense_matrices(full: float, partial: float) -> None:
    gains = {name: None if gain == NEVER else gain for name, gain in (("full_gain", full), ("partial_gain", partial))}
    solver = InFaceFrankWolfe(radius=RADIUS, **gains, **EXACT)
    wanted = in_face_iterates(Dense.of(SMALL), RADIUS, full, partial, 25)
    state = solver.init(SMALL, 0)
    for each in wanted:
        np.testing.assert_allclose(whole(solver.answer(state)), each, atol=1e-8)
        state, _ = solver.step(SMALL, state)


@pytest.mark.parametrize("rule", ["one_over_k", "two_over_k_plus_two", "line_search"])
def test_hazan_steps_are_those_of_dense_matrices(rule: Any) -> None:
    solver, dense = Hazan(radius=RADIUS, step_rule=rule, **EXACT), Dense.of(SMALL)
    x = dense.best_vertex(dense.gradient(np.zeros_like(dense.values)), RADIUS)
    state = solver.init(SMALL, 0)
    for k in range(1, 80):  # beyond the first compression
        vertex = dense.best_vertex(dense.gradient(x), RADIUS)
        length = {"one_over_k": 1 / (k + 1), "two_over_k_plus_two": 2 / (k + 2)}.get(
            rule, min(1.0, dense.line(x, vertex - x))
        )
        x = x + length * (vertex - x)
        state, _ = solver.step(SMALL, state)
        np.testing.assert_allclose(whole(solver.answer(state)), x, atol=1e-8)
    assert state["vectors"].shape[1] < 79


@pytest.mark.slow
@pytest.mark.parametrize("solver", [Hazan(radius=RADIUS), InFaceFrankWolfe(radius=RADIUS)])
def test_the_gap_is_above_the_distance_from_the_minimum(solver: Any) -> None:
    dense = Dense.of(SMALL)
    least = dense.minimum(RADIUS)
    state = solver.init(SMALL, 0)
    for iteration in range(60):
        state, report = solver.step(SMALL, state)
        metrics = SMALL.measure(solver.answer(state))
        x = whole(solver.answer(state))
        true = metrics["objective"] - least
        assert metrics["objective"] == pytest.approx(dense.f(x), rel=1e-10)
        assert metrics["gap"] == pytest.approx(dense.gap(x, RADIUS), rel=1e-6)
        assert -1e-9 <= true <= metrics["gap"] * (1 + 1e-9)
        assert true <= report.residual * SMALL.observed.norm**2 / 2 + 1e-9
        assert metrics["nuclear_norm"] <= RADIUS * (1 + 1e-9)
        if iteration >= 10:
            assert true <= 8 * RADIUS**2 / (iteration + 1)
    assert true < 0.02 * SMALL.observed.norm**2


@pytest.mark.slow
def test_in_face_steps_reach_the_minimum_at_its_rank() -> None:
    problem = SyntheticCompletion(rows=40, columns=30, rank=2, fraction=0.5, noise=0.05, seed=3).load()
    assert isinstance(problem.truth, tuple)
    radius = 0.8 * float(np.linalg.svd(problem.truth[0] @ problem.truth[1].T)[1].sum())
    in_face, plain = (InFaceFrankWolfe(radius=radius, full_gain=gain, **EXACT) for gain in (0.0, None))
    least = Dense.of(problem).minimum(radius)
    found = {}
    for name, solver in (("in face", in_face), ("plain", plain)):
        state = run(solver, problem, 150)
        found[name] = problem.measure(solver.answer(state))
        assert int(state["steps"].sum()) == 150
    assert found["in face"]["rank"] < found["plain"]["rank"]
    assert found["in face"]["objective"] - least < found["plain"]["objective"] - least


def test_rank_one_changes_of_a_thin_svd_are_those_of_dense_matrices() -> None:
    random = np.random.default_rng(0)
    u, s, vt = np.linalg.svd(random.standard_normal((8, 5)))
    svd = ThinSVD(u[:, :3], s[:3], vt[:3].T)
    x = (u[:, :3] * s[:3]) @ vt[:3]
    for step in range(12):
        left, right = random.standard_normal(8), random.standard_normal(5)
        if step % 3 == 2:  # within the span already
            left, right = svd.left[:, 0], svd.right[:, -1]
        svd, x = svd.plus_rank_one(0.7, left, right), 0.7 * x + np.outer(left, right)
        np.testing.assert_allclose((svd.left * svd.s) @ svd.right.T, x, atol=1e-11)
        np.testing.assert_allclose(svd.left.T @ svd.left, np.eye(len(svd.s)), atol=1e-12)
        assert (np.diff(svd.s) <= 0).all()
    less = svd.plus_rank_one(1.0, -svd.left[:, 0] * svd.s[0], svd.right[:, 0])
    assert len(less.s) == len(svd.s) - 1
    np.testing.assert_allclose(less.orthonormal().s, less.s, rtol=1e-12)


SOLVERS: list[Any] = [
    *(Hazan(radius=3.0, step_rule=rule) for rule in ("one_over_k", "two_over_k_plus_two", "line_search")),
    *(InFaceFrankWolfe(radius=3.0, full_gain=a, partial_gain=b) for a, b in ((0, None), (1, 1), (None, None))),
]


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_solve_goes_on_from_its_arrays_to_the_bit(solver: Any) -> None:
    problem = SyntheticCompletion(rows=30, columns=20, fraction=0.5, seed=2).load()
    state = run(solver, problem, 70)
    kept = {name: np.array(values, order="C") for name, values in run(solver, problem, 40).items()}
    for _ in range(30):
        kept, _ = solver.step(problem, kept)
    assert kept.keys() == state.keys()
    assert all(np.array_equal(kept[name], state[name]) for name in state)


def test_a_radius_that_is_not_set_is_estimated_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    found = radius_of(SMALL.observed, SMALL.rank, None)
    assert isinstance(SMALL.truth, tuple)
    true = float(np.linalg.svd(SMALL.truth[0] @ SMALL.truth[1].T)[1].sum())
    assert 0.7 * true < found < 1.5 * true
    assert "solver.radius is not set" in caplog.text
    assert float(Hazan().init(SMALL, 0)["radius"]) == found


@pytest.mark.parametrize("solver", [Hazan, InFaceFrankWolfe])
def test_bad_fields_and_problems_are_refused(solver: Any) -> None:
    for radius in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="radius"):
            solver(radius=radius)
    with pytest.raises(ValueError, match="eigen_products"):
        solver(eigen_products=1)
    with pytest.raises(UserError, match="choose another solver"):
        solver().check(type("Other", (Problem,), {"name": "poisson", "measure": None})())


def test_bad_combinations_are_one_line() -> None:
    with pytest.raises(ValueError, match=r"partial_gain is 0\.5, below full_gain 1; raise it"):
        InFaceFrankWolfe(full_gain=1, partial_gain=0.5)
    with pytest.raises(UserError, match=r"solver\.radius is 3, but the trace of random_max_cut is its number"):
        Hazan(radius=3).check(RandomMaxCut(vertices=6, edges=8).load())
    with pytest.raises(UserError, match="is not a matrix completion problem"):
        InFaceFrankWolfe().check(RandomMaxCut(vertices=6, edges=8).load())
