"""The work of proofs: entries of factors against SuperLU's own, and solves whose measurements are spaced by it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.sparse import csc_array, csr_array, diags_array
from scipy.sparse.linalg import splu

from narrowcast.platform import solving
from narrowcast.platform.solving import SolveState
from narrowcast.platform.types import FloatArray
from narrowcast.solve_run import Solve, load_solve
from narrowcast.solves.certificate import SYMMETRIC, column_counts, elimination_order, proof_work
from narrowcast.solves.max_cut import MaxCut
from narrowcast.solves.weighted_graph import WeightedGraph, random_graph, torus


def weights_of(graph: WeightedGraph) -> csr_array:
    return csr_array((graph.weights, graph.indices, graph.indptr), shape=(graph.vertices, graph.vertices))


GRAPHS = [random_graph(40, 90, 1), random_graph(300, 900, 2), torus(15, 3), random_graph(50, 10, 4)]


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda each: f"{each.vertices}-{each.edges}")
def test_counted_columns_are_those_of_the_factors_of_superlu(graph: WeightedGraph) -> None:
    weights = weights_of(graph)
    drawn = np.random.default_rng(0).uniform(10, 20, graph.vertices) * np.abs(weights).max()
    factors = splu(csc_array(weights + diags_array(drawn * np.diff(graph.indptr).max())), **SYMMETRIC)
    order = elimination_order(weights)
    assert np.array_equal(order, np.argsort(factors.perm_c))
    assert np.array_equal(np.sort(column_counts(weights, order)), np.sort(np.diff(factors.L.indptr)))


def eliminated(weights: FloatArray, order: Any) -> list[int]:
    """Return the entries of each column of L by eliminating one vertex after the other from the graph."""
    joined, counts = weights != 0, []
    for place, vertex in enumerate(order):
        left = [other for other in order[place + 1 :] if joined[vertex, other]]
        counts.append(1 + len(left))
        for one in left:
            joined[one, left] = True
    return counts


def test_counted_columns_are_those_of_elimination_in_any_order() -> None:
    graph = random_graph(30, 60, 5)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(30)
        assert column_counts(weights_of(graph), order).tolist() == eliminated(weights_of(graph).toarray(), order)


def test_a_factorisation_of_a_full_matrix_is_a_third_of_the_cube() -> None:
    full = csr_array(np.ones((400, 400)))
    more = proof_work(full, "factorisation") - proof_work(full, "lanczos")
    assert more == pytest.approx(0.4 * 400**3 / 3, rel=0.01)


def solve() -> Solve:
    values = {
        "problem": {"kind": "random_max_cut", "vertices": 100, "edges": 3000, "proof": "factorisation", "seed": 1},
        "solver": "mixing",
        "iterations": 4000,
        "evaluate_every": 50,
    }
    return load_solve({**values, "record_every": 50})


def measured_iterations(given: Solve, problem: MaxCut, cut: int | None = None) -> tuple[list[int], SolveState]:
    """Return the iterations with metrics and the last state of a solve, which may be resumed after an iteration."""
    state, found, begun = solving.begin(problem, given.solver, 0), list[int](), cut is None
    kept = given.model_copy(update={"checkpoint_every": cut, "checkpoint_seconds": 1e9})
    while True:
        for row in solving.iterations(problem, given.solver, kept, state):
            found += [row.step] * bool(row.metrics)
            if row.state is not None:
                state = SolveState.unpacked(*row.state.packed())
                if not begun:
                    break
        if begun:
            return found, state
        begun = True


@pytest.mark.slow
def test_measurements_with_the_last_one_are_no_more_work_than_iterations(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = solve()
    problem = given.problem_source.load()
    straight, unspaced = measured_iterations(given, problem)
    assert straight == list(range(50, 4001, 50)) and not caplog.text
    monkeypatch.setattr(solving, "FREE_WORK", 0)
    spaced, state = measured_iterations(given, problem)
    assert np.array_equal(state.arrays["vectors"], unspaced.arrays["vectors"])
    work = problem.measurement_work(given.solver.answer(state.arrays))
    ratio, wanted = work.measurement / work.iteration, []
    for step in range(50, 4000, 50):
        if (len(wanted) + 2) * ratio <= step:
            wanted.append(step)
    assert spaced == [*wanted, 4000]
    assert 2 < len(spaced) < 40
    assert caplog.text.count(f"takes about as long as {ratio:.0f} iterations") == 1
    assert len(spaced) * work.measurement <= 4000 * work.iteration


def test_a_resumed_solve_is_measured_at_the_iterations_of_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "FREE_WORK", 0)
    given = solve()
    problem = given.problem_source.load()
    straight, _ = measured_iterations(given, problem)
    assert measured_iterations(given, problem, straight[1] + 50)[0] == straight
