"""The relaxation of MAXCUT: its bound against dense matrices and all cuts, rounding, and the Mixing method."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from narrowcast.platform.errors import UserError
from narrowcast.platform.solving import Problem
from narrowcast.platform.types import Arrays, FloatArray
from narrowcast.solves.certificate import is_bounded_below, least_eigenvalue_bound
from narrowcast.solves.max_cut import MaxCut, MaxCutFile, RandomMaxCut, TorusMaxCut, round_by_hyperplanes
from narrowcast.solves.mixing import Mixing
from narrowcast.solves.semidefinite import pataki_rank

PUBLISHED = {"G1": 12083.20, "G14": 3191.57, "G22": 14135.95, "G48": 6000.0, "G55": 11039.46}
"""Optima of the relaxation."""
SMALL = RandomMaxCut(vertices=14, edges=40, seed=2)
SELECTIONS: tuple[Any, ...] = ("cyclic", "uniform", "importance", "greedy")


def dense(problem: MaxCut) -> FloatArray:
    graph, whole = problem.graph, np.zeros((problem.graph.vertices,) * 2)
    rows = np.repeat(np.arange(graph.vertices), np.diff(graph.indptr))
    whole[rows, graph.indices] = graph.weights
    return whole


def solved(solver: Mixing, problem: MaxCut, iterations: int, residual: float = 0.0) -> Arrays:
    state = solver.init(problem, 0)
    for _ in range(iterations):
        state, report = solver.step(problem, state)
        if report.residual <= residual:
            break
    return state


def largest_cut(weights: FloatArray) -> float:
    size, best = len(weights), 0.0
    for signs in itertools.product((1, -1), repeat=size - 1):
        x = np.array([1, *signs])
        best = max(best, float((weights * (1 - np.outer(x, x))).sum()) / 4)
    return best


@pytest.mark.parametrize("proof", ["lanczos", "factorisation"])
@pytest.mark.parametrize("vertices", [20, 90])
def test_the_bound_on_the_least_eigenvalue_is_below_it_and_near(proof: Any, vertices: int) -> None:
    problem = RandomMaxCut(vertices=vertices, edges=3 * vertices, seed=1).load()
    diagonal = np.random.default_rng(0).normal(size=vertices)
    exact = float(np.linalg.eigvalsh(dense(problem) + np.diag(diagonal))[0])
    found = least_eigenvalue_bound(problem.graph, diagonal, proof)
    assert exact - 1e-6 < found <= exact


def test_a_bound_below_all_eigenvalues_is_proved_and_no_other() -> None:
    problem = RandomMaxCut(vertices=90, edges=270, seed=1).load()
    diagonal = np.random.default_rng(0).normal(size=90)
    exact = float(np.linalg.eigvalsh(dense(problem) + np.diag(diagonal))[0])
    assert is_bounded_below(problem.graph, diagonal, exact - 1e-9)
    assert not is_bounded_below(problem.graph, diagonal, exact + 1e-9)


def test_a_gap_is_proved_exactly_where_it_is_measured() -> None:
    problem = RandomMaxCut(vertices=90, edges=270, seed=1, roundings=0, proof="factorisation").load()
    for sweeps in (1, 20, 200):
        answer = solved(Mixing(), problem, sweeps)
        gap = problem.measure(answer)["gap"]
        assert problem.proves(answer, gap * (1 + 1e-4) + 1e-9)
        assert not problem.proves(answer, gap * (1 - 1e-3) - 1e-9)


def test_a_singular_matrix_of_high_multiplicity_has_a_bound_near_zero() -> None:
    problem = RandomMaxCut(vertices=200, edges=1000, seed=1, roundings=0).load()
    answer = solved(Mixing(momentum=0.45), problem, 2000, 1e-9)
    whole, vectors = dense(problem), answer["vectors"]
    dual = np.asarray(np.linalg.norm(whole @ vectors, axis=1))
    assert np.count_nonzero(np.linalg.eigvalsh(whole + np.diag(dual)) < 1e-6) > 5
    assert -1e-4 < least_eigenvalue_bound(problem.graph, dual, "factorisation") <= 1e-8


def test_every_dual_point_bounds_every_cut() -> None:
    problem = SMALL.load()
    best = largest_cut(dense(problem))
    for seed in range(5):
        dual = np.random.default_rng(seed).uniform(0, 8, problem.graph.vertices)
        assert problem.bound(dual) >= best
    metrics = problem.measure(solved(Mixing(), problem, 3000, 1e-10))
    assert best <= metrics["bound"]
    assert metrics["cut"] <= best
    assert metrics["relaxation"] <= metrics["bound"] <= metrics["relaxation"] * (1 + 1e-8)
    assert metrics["gap"] <= 1e-8
    assert metrics["cut"] >= 0.878 * metrics["bound"]


def test_metrics_are_those_of_dense_matrices() -> None:
    problem = SMALL.load()
    vectors = solved(Mixing(rank=6), problem, 3)["vectors"]
    weights = dense(problem)
    metrics = problem.measure({"vectors": vectors})
    assert metrics["relaxation"] == pytest.approx((weights * (1 - vectors @ vectors.T)).sum() / 4, rel=1e-13)
    dual = np.linalg.norm(weights @ vectors, axis=1)
    least = float(np.linalg.eigvalsh(weights + np.diag(dual))[0])
    wanted = weights.sum() / 4 + (dual.sum() - len(dual) * min(0.0, least)) / 4
    assert metrics["bound"] == pytest.approx(wanted, rel=1e-12)


def test_hyperplanes_give_the_cuts_of_a_plain_loop_in_any_parts() -> None:
    problem = SMALL.load()
    vectors, weights = solved(Mixing(rank=6), problem, 5)["vectors"], dense(problem)
    found = round_by_hyperplanes(problem.graph, vectors, 100, 7)
    parts = [round_by_hyperplanes(problem.graph, vectors, 50, 7, first) for first in (0, 50)]
    assert np.array_equal(found.cuts, np.concatenate([each.cuts for each in parts]))
    signs = 2 * found.sides - 1
    assert found.cuts.max() == (weights * (1 - np.outer(signs, signs))).sum() / 4
    assert len(set(found.cuts)) > 3


def test_an_answer_is_rounded_by_the_hyperplanes_that_its_cut_was_measured_with() -> None:
    problem = replace(SMALL.load(), roundings=50)
    vectors = solved(Mixing(rank=6), problem, 5)["vectors"]
    metrics, found = problem.measure({"vectors": 3 * vectors}), problem.rounded(3 * vectors, 80)
    assert (metrics["cut"], metrics["mean_cut"]) == (found.cuts[:50].max(), found.cuts[:50].mean())
    assert np.array_equal(found.cuts[50:], problem.rounded(vectors, 30, first=50).cuts)


def plain_sweep(weights: FloatArray, vectors: FloatArray, order: Any, momentum: float) -> FloatArray:
    vectors = vectors.copy()
    for i in order:
        gradient = weights[i] @ vectors
        if np.linalg.norm(gradient):
            turned = -(gradient / np.linalg.norm(gradient) + momentum * vectors[i])
            vectors[i] = turned / np.linalg.norm(turned)
    return vectors


@pytest.mark.parametrize("momentum", [0.0, 0.45])
def test_a_sweep_is_that_of_a_plain_loop(momentum: float) -> None:
    problem = SMALL.load()
    solver = Mixing(rank=5, momentum=momentum)
    state = solver.init(problem, 0)
    wanted = state["vectors"].copy()
    for _ in range(4):
        state, _ = solver.step(problem, state)
        wanted = plain_sweep(dense(problem), wanted, range(14), momentum)
    np.testing.assert_allclose(state["vectors"], wanted, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(state["vectors"], axis=1), 1, atol=1e-14)


@pytest.mark.slow
def test_greedy_updates_are_those_of_a_plain_loop() -> None:
    problem = SMALL.load()
    solver, weights = Mixing(rank=5, selection="greedy"), dense(problem)
    state = solver.init(problem, 0)
    wanted = state["vectors"].copy()
    for _ in range(14):
        gradient = weights @ wanted
        decrease = np.linalg.norm(gradient, axis=1) + np.einsum("ik,ik->i", gradient, wanted)
        wanted = plain_sweep(weights, wanted, [int(decrease.argmax())], 0.0)
    state, _ = solver.step(problem, state)
    np.testing.assert_allclose(state["vectors"], wanted, atol=1e-12)


def test_importance_draws_by_the_norms_of_the_gradients() -> None:
    from narrowcast.solves.vector_kernels import chosen_updates, weighted_sums

    problem = SMALL.load()
    vectors = Mixing(rank=5).init(problem, 0)["vectors"]
    arrays = (problem.graph.indptr, problem.graph.indices, problem.graph.weights)
    norms = np.linalg.norm(dense(problem) @ vectors, axis=1)
    edges = np.concatenate([[0.0], np.cumsum(norms) / norms.sum()])
    for i in range(14):
        for uniform in (edges[i] + 1e-9, edges[i + 1] - 1e-9):
            moved = vectors.copy()
            chosen_updates(*arrays, moved, weighted_sums(*arrays, moved), np.array([uniform]), False, 0.0)
            assert np.flatnonzero((moved != vectors).any(axis=1)).tolist() == [i]


@pytest.mark.parametrize("selection", SELECTIONS)
def test_updates_without_momentum_never_increase_the_objective(selection: Any) -> None:
    problem = RandomMaxCut(vertices=60, edges=200, seed=4, roundings=0).load()
    solver = Mixing(selection=selection)
    state, values = solver.init(problem, 0), []
    for _ in range(40):
        state, _ = solver.step(problem, state)
        values.append(problem.measure(solver.answer(state))["relaxation"])
    assert all(after >= before - 1e-10 for before, after in itertools.pairwise(values))


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("momentum", [0.0, 0.4])
def test_all_selections_reach_the_certified_optimum(selection: Any, momentum: float) -> None:
    problem = RandomMaxCut(vertices=60, edges=200, seed=4, roundings=0).load()
    answer = solved(Mixing(selection=selection, momentum=momentum), problem, 3000, 1e-7)
    assert problem.measure(answer)["gap"] <= 1e-7


@pytest.mark.data("gset")
@pytest.mark.parametrize("name", ["G14", "G48"])
def test_the_optima_of_gset_are_certified(name: str) -> None:
    problem = MaxCutFile(path=f"gset/{name}", roundings=10).load()
    metrics = problem.measure(solved(Mixing(momentum="adaptive"), problem, 1000, 1e-5))
    assert metrics["gap"] <= 1e-6
    assert metrics["relaxation"] == pytest.approx(PUBLISHED[name], abs=0.006)


def test_adaptive_momentum_needs_fewer_sweeps_on_a_torus() -> None:
    problem = TorusMaxCut(side=20, roundings=0).load()
    sweeps = {}
    for momentum in (0.0, "adaptive"):
        state = solved(Mixing(momentum=momentum), problem, 20_000, 1e-5)  # type: ignore[arg-type]
        sweeps[momentum] = int(state["iteration"])
        assert problem.measure(state)["gap"] <= 1e-4
    assert sweeps["adaptive"] < sweeps[0.0] / 3


def test_isolated_vertices_keep_unit_vectors() -> None:
    problem = RandomMaxCut(vertices=30, edges=5, seed=1).load()
    vectors = solved(Mixing(), problem, 50)["vectors"]
    assert np.count_nonzero(np.diff(problem.graph.indptr) == 0) > 10
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-14)
    assert problem.measure({"vectors": vectors})["gap"] <= 1e-12


@pytest.mark.parametrize("constraints", [1, 2, 3, 5, 6, 7, 800])
def test_the_rank_of_some_solution_is_the_largest_of_the_bound(constraints: int) -> None:
    rank = pataki_rank(constraints)
    assert rank * (rank + 1) // 2 <= constraints < (rank + 1) * (rank + 2) // 2


def test_a_low_rank_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    Mixing(rank=2).check(SMALL.load())
    Mixing(rank=2).init(SMALL.load(), 0)
    assert caplog.text.count("rank 2 is below 4") == 1  # a command calls both


def test_bad_combinations_are_one_line() -> None:
    with pytest.raises(UserError, match="adaptive momentum needs selection: cyclic, got greedy"):
        Mixing(momentum="adaptive", selection="greedy").check(SMALL.load())
    with pytest.raises(ValueError, match=r"less than 0\.5"):
        Mixing(momentum=0.5)
    with pytest.raises(ValueError, match="edges is 11, but 5 vertices have 10 pairs"):
        RandomMaxCut(vertices=5, edges=11)
    with pytest.raises(UserError, match="problems of MAXCUT, not completion"):
        Mixing().check(type("Other", (Problem,), {"name": "completion", "measure": None})())


def complete(tmp_path: Path, weight: float) -> MaxCut:
    """Return the problem of eight vertices that are all joined by edges of one weight."""
    edges = [(i, j) for i in range(1, 9) for j in range(i + 1, 9)]
    lines = [f"8 {len(edges)}", *(f"{i} {j} {weight:g}" for i, j in edges)]
    (tmp_path / "complete.txt").write_text("\n".join(lines) + "\n")
    return MaxCutFile(path=tmp_path / "complete.txt", proof="factorisation").load()


def test_the_gap_of_a_cut_that_is_worth_nothing_is_no_rounding_error(tmp_path: Path) -> None:
    """With negative weights alone the best cut is empty, its vectors are equal, and both values are 0."""
    problem = complete(tmp_path, -1)
    metrics = problem.measure({"vectors": np.tile(np.eye(1, 4), (8, 1))})
    assert metrics["relaxation"] == pytest.approx(0, abs=1e-12)
    assert 0 <= metrics["bound"] < 1e-8 and 0 <= metrics["gap"] < 1e-8
    assert metrics["cut"] == metrics["mean_cut"] == 0
    assert problem.proves({"vectors": np.tile(np.eye(1, 4), (8, 1))}, 1e-8)


@pytest.mark.parametrize("weight", [-1.0, -0.01, 0.001, 1.0, 50.0])
def test_the_gap_is_relative_to_one_plus_the_bound(tmp_path: Path, weight: float) -> None:
    problem = complete(tmp_path, weight)
    vectors = solved(Mixing(rank=3), problem, 2)["vectors"]
    weights = weight * (1 - np.eye(8))
    relaxation = float((weights * (1 - vectors @ vectors.T)).sum()) / 4
    dual = np.linalg.norm(weights @ vectors, axis=1)
    least = float(np.linalg.eigvalsh(weights + np.diag(dual))[0])
    bound = weights.sum() / 4 + (dual.sum() + 8 * max(0.0, -least)) / 4
    gap = problem.measure({"vectors": vectors})["gap"]
    assert gap == pytest.approx((bound - relaxation) / (1 + abs(bound)), rel=1e-6, abs=1e-9)
    assert problem.proves({"vectors": vectors}, gap * (1 + 1e-4) + 1e-9)
    assert not problem.proves({"vectors": vectors}, gap * (1 - 1e-3) - 1e-9)
