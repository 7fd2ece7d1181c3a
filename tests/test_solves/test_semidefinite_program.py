"""Linear semidefinite programs: products and certificates against dense matrices, and what is refused."""

from __future__ import annotations

import math
import pickle
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array

from narrowcast.platform.errors import UserError
from narrowcast.platform.solving import Problem
from narrowcast.platform.types import FloatArray
from narrowcast.solves.max_cut import RandomMaxCut, unit_vectors
from narrowcast.solves.mixing import Mixing
from narrowcast.solves.semidefinite import (
    SemidefiniteProgram,
    SymmetricConstraints,
    constraints_of,
    implied_trace_bound,
    semidefinite_program_of,
)

SIDE, COUNT = 9, 5


def dense_matrices(seed: int = 0, density: float = 0.2) -> FloatArray:
    random = np.random.default_rng(seed)
    drawn = random.normal(size=(COUNT + 1, SIDE, SIDE)) * (random.random((COUNT + 1, SIDE, SIDE)) < density)
    return np.asarray(drawn + drawn.transpose(0, 2, 1))


def constraints_from(matrices: FloatArray) -> SymmetricConstraints:
    which, row, column = np.nonzero(matrices)
    return constraints_of(matrices.shape[1], len(matrices), which, row, column, matrices[which, row, column])


def program(seed: int = 0, **fields: Any) -> tuple[SemidefiniteProgram, FloatArray]:
    matrices = dense_matrices(seed)
    targets = np.random.default_rng(seed + 100).normal(size=COUNT)
    constraints = constraints_from(matrices[1:])
    return SemidefiniteProgram("drawn", "here", csr_array(matrices[0]), constraints, targets, **fields), matrices


def test_products_are_those_of_dense_matrices() -> None:
    problem, matrices = program()
    random = np.random.default_rng(3)
    vectors, others, dual = random.normal(size=(SIDE, 4)), random.normal(size=(SIDE, 4)), random.normal(size=COUNT)
    whole = vectors @ vectors.T
    wanted = np.einsum("mij,ij->m", matrices[1:], whole)
    np.testing.assert_allclose(problem.constraints.of_vectors(vectors), wanted, atol=1e-12)
    np.testing.assert_allclose(problem.constraints.of_matrix(whole), wanted, atol=1e-12)
    crossed = np.einsum("mij,ij->m", matrices[1:], vectors @ others.T)
    np.testing.assert_allclose(problem.constraints.of_vectors(vectors, others), crossed, atol=1e-12)
    adjoint = np.einsum("m,mij->ij", dual, matrices[1:])
    np.testing.assert_allclose(problem.constraints.adjoint(dual).toarray(), adjoint, atol=1e-13)
    np.testing.assert_allclose(problem.slack(dual).toarray(), matrices[0] - adjoint, atol=1e-13)
    assert problem.objective(vectors) == pytest.approx(float(np.sum(matrices[0] * whole)), rel=1e-12)


def test_one_triangle_is_the_same_matrix_as_both() -> None:
    matrices = dense_matrices()[1:]
    both = constraints_from(matrices)
    for triangle in (np.triu, np.tril):
        half = constraints_from(np.array([triangle(each) for each in matrices]))
        assert half.digest == both.digest


def test_mirror_images_that_differ_by_rounding_are_one_entry_and_others_are_said_to_all_digits() -> None:
    random = np.random.default_rng(5)
    factors = random.normal(size=(SIDE, 40)) * 10.0 ** random.uniform(-3, 3, 40)
    product = np.array([[float(sum(a * b for a, b in zip(x, y, strict=True))) for y in factors] for x in factors])
    turned = np.tril(product) + np.triu([[sum(x[::-1] * y[::-1]) for y in factors] for x in factors], 1)
    assert (turned != turned.T).any()
    upper = constraints_from(np.triu(turned)[None])
    assert constraints_from(turned[None]).digest == upper.digest
    for wrong in (1 + 1e-9, 1.0001):
        moved = turned.copy()
        moved[1, 0] = moved[0, 1] * wrong
        with pytest.raises(UserError, match=r"^entry \(1, 2\) of matrix 1 is ") as raised:
            constraints_from(moved[None])
        said = [float(each) for each in re.findall(r"-?\d+\.\d+(?:e[-+]\d+)?", str(raised.value))]
        assert said == [moved[0, 1], moved[1, 0]]


def test_every_dual_point_bounds_every_feasible_matrix() -> None:
    random = np.random.default_rng(8)
    base, _ = program(2)
    for seed in range(20):
        vectors = np.random.default_rng(seed).normal(size=(SIDE, 3))
        trace = float(np.sum(vectors**2))
        problem = replace(base, targets=base.constraints.of_vectors(vectors), known_trace_bound=trace)
        dual = random.normal(size=COUNT)
        exact = float(problem.targets @ dual) + trace * min(
            0.0, float(np.linalg.eigvalsh(problem.slack(dual).toarray())[0])
        )
        metrics = problem.measure({"vectors": vectors, "dual": dual})
        assert metrics["infeasibility"] <= 1e-14
        assert exact - 1e-6 * (1 + abs(exact)) < metrics["bound"] <= exact
        assert metrics["bound"] <= metrics["objective"]
        wanted = (metrics["objective"] - metrics["bound"]) / (1 + abs(metrics["objective"]) + abs(metrics["bound"]))
        assert metrics["gap"] == pytest.approx(wanted, rel=1e-12)
        assert metrics["rank"] == 3


def test_without_a_bound_on_the_trace_only_positive_slacks_prove_one() -> None:
    problem, matrices = program()
    assert problem.trace_bound is None
    vectors = np.random.default_rng(0).normal(size=(SIDE, 2))
    assert "bound" not in problem.measure({"vectors": vectors, "dual": np.zeros(COUNT)})
    assert problem.bound(np.zeros(COUNT)) == -math.inf
    raised = replace(problem, cost=csr_array(matrices[0] + 10 * np.eye(SIDE)), proof="factorisation")
    assert raised.bound(np.zeros(COUNT)) == 0
    assert "bound" in raised.measure({"vectors": vectors, "dual": np.zeros(COUNT)})
    assert "bound" not in raised.measure({"vectors": vectors})


def test_the_trace_bound_is_the_trace_where_constraints_span_the_identity() -> None:
    random = np.random.default_rng(1)
    matrices, mixing = dense_matrices()[1:], random.normal(size=(COUNT, COUNT))
    matrices[2] = np.eye(SIDE)
    mixed = constraints_from(np.einsum("ab,bij->aij", mixing, matrices))
    vectors = random.normal(size=(SIDE, 4))
    targets = mixed.of_vectors(vectors)
    trace = float(np.sum(vectors**2))
    found = implied_trace_bound(mixed, targets)
    assert found is not None
    assert trace * (1 - 1e-12) <= found <= trace * (1 + 1e-8)
    assert implied_trace_bound(constraints_from(matrices[:2]), targets[:2]) is None


def test_max_cut_is_the_same_relaxation() -> None:
    problem = RandomMaxCut(vertices=30, edges=90, seed=3, roundings=0).load()
    stated = semidefinite_program_of(problem)
    assert stated.pataki_rank == 7
    state = Mixing(momentum=0.45).init(problem, 0)
    for _ in range(5):
        state, _ = Mixing(momentum=0.45).step(problem, state)
    own = problem.measure(state)
    sums = np.linalg.norm(stated.cost @ state["vectors"], axis=1)
    metrics = stated.measure({"vectors": state["vectors"], "dual": -sums})
    assert metrics["infeasibility"] <= 1e-14
    assert problem.graph.total / 2 - metrics["objective"] == pytest.approx(own["relaxation"], rel=1e-13)
    assert problem.graph.total / 2 - metrics["bound"] == pytest.approx(own["bound"], rel=1e-12)
    scaled = {"vectors": state["vectors"] * np.random.default_rng(0).uniform(0.5, 2, (30, 1))}
    assert problem.measure(scaled)["relaxation"] == pytest.approx(own["relaxation"], rel=1e-13)


def test_vectors_of_unit_norm_are_unchanged_and_zero_becomes_one() -> None:
    drawn = np.random.default_rng(0).normal(size=(6, 3))
    unit = unit_vectors(drawn)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-15)
    assert unit_vectors(unit) is unit
    drawn[2] = 0
    assert unit_vectors(drawn)[2].tolist() == [1, 0, 0]


def test_the_digest_depends_on_all_of_a_program() -> None:
    problem, _ = program()
    other, _ = program(1)
    again = pickle.loads(pickle.dumps(problem))
    assert again.digest == program()[0].digest
    different = {
        problem.digest,
        replace(problem, cost=other.cost).digest,
        replace(problem, constraints=other.constraints).digest,
        replace(problem, targets=other.targets).digest,
        replace(problem, known_trace_bound=3.0).digest,
    }
    assert len(different) == 5


def entries(*rows: tuple[int, int, int, float]) -> SymmetricConstraints:
    which, row, column, value = (np.array(each) for each in zip(*rows, strict=True))
    return constraints_of(3, 2, which, row, column, value.astype(np.float64))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(0, 0, 1, 2.0), (0, 1, 0, 3.0)], r"\(1, 2\) of matrix 1 is 2, but its mirror image 3: the matrix is not sym"),
        ([(1, 0, 1, 2.0), (1, 0, 1, 2.0)], r"\(1, 2\) of matrix 2 is given twice"),
        ([(0, 0, 3, 2.0)], "entry 1 has the column 4; 1 to 3 are allowed"),
        ([(0, -1, 2, 2.0)], "entry 1 has the row 0; 1 to 3 are allowed"),
        ([(2, 0, 0, 2.0)], "entry 1 has the matrix 3; 1 to 2 are allowed"),
        ([(0, 0, 0, math.nan)], "entry 1 has the value nan; give finite values"),
    ],
)
def test_wrong_entries_are_one_line(rows: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        entries(*rows)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([1.0, 1.0], "constraint 2 has no entries: it says 0 = 1, which nothing satisfies; leave it out"),
        ([1.0, 0.0], "constraint 2 has no entries: it says 0 = 0; leave it out"),
        ([1.0, math.inf], "the target of constraint 2 is inf"),
    ],
)
def test_constraints_that_nothing_satisfies_are_one_line(targets: list[float], message: str) -> None:
    constraints = entries((0, 0, 0, 1.0), (1, 1, 1, 0.0))
    with pytest.raises(UserError, match=message):
        SemidefiniteProgram("x", "here", csr_array((3, 3)), constraints, np.array(targets))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_negative_diagonals_are_refused(sign: float) -> None:
    constraints = entries((0, 0, 1, 1.0), (1, 0, 0, sign), (1, 2, 2, 3 * sign))
    with pytest.raises(UserError, match="constraint 2 asks a sum of diagonal entries to be"):
        SemidefiniteProgram("x", "here", csr_array((3, 3)), constraints, np.array([1.0, -4 * sign]))


def test_other_problems_are_one_line() -> None:
    with pytest.raises(
        UserError, match="completion is not a semidefinite program; use problems such as sdpa or max_cut"
    ):
        semidefinite_program_of(type("Other", (Problem,), {"name": "completion", "measure": None})())
