"""Hazan's algorithm on MAXCUT: dense references, its bound, and the soft maximum of the paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from narrowcast.solves.hazan import Hazan, PenalisedCut
from narrowcast.solves.max_cut import RandomMaxCut
from narrowcast.solves.mixing import Mixing

PROBLEM = RandomMaxCut(vertices=14, edges=40, seed=2, roundings=0).load()
EXACT = {"eigen_tolerance": 1e-14, "eigen_products": 400}


def dense_weights() -> Any:
    graph, whole = PROBLEM.graph, np.zeros((14, 14))
    whole[np.repeat(np.arange(14), np.diff(graph.indptr)), graph.indices] = graph.weights
    return whole


def test_steps_are_those_of_dense_matrices() -> None:
    weights, solver = dense_weights(), Hazan(penalty_weight=2.0, **EXACT)

    def gradient(x: Any) -> Any:
        return weights / 4 + 2.0 * np.diag(np.diag(x) - 1)

    def vertex(x: Any) -> Any:
        least = np.linalg.eigh(gradient(x))[1][:, 0]
        return 14 * np.outer(least, least)

    x, state = vertex(np.zeros((14, 14))), solver.init(PROBLEM, 0)
    for _ in range(50):
        change = vertex(x) - x
        x = x + min(1.0, -np.sum(gradient(x) * change) / (2.0 * np.sum(np.diag(change) ** 2))) * change
        state, _ = solver.step(PROBLEM, state)
        np.testing.assert_allclose(state["vectors"] @ state["vectors"].T, x, atol=1e-8)
    dual = -2.0 * (np.diag(x) - 1)
    np.testing.assert_allclose(solver.answer(state)["dual"], dual, atol=1e-7)
    bound = weights.sum() / 4 - dual.sum() - 14 * min(0.0, np.linalg.eigvalsh(weights / 4 - np.diag(dual))[0])
    assert PROBLEM.measure(solver.answer(state))["bound"] <= bound + 1e-8


@pytest.mark.parametrize("penalty", ["quadratic", "soft_max"])
def test_the_bounds_hold_and_approach_the_relaxation(penalty: Any) -> None:
    weight = {"quadratic": 1.0, "soft_max": 40.0}[penalty]
    exact, plain = Mixing(), Hazan(penalty=penalty, penalty_weight=weight, sharpness=8)
    vectors = exact.init(PROBLEM, 0)
    for _ in range(400):
        vectors, _ = exact.step(PROBLEM, vectors)
    optimum = PROBLEM.measure(exact.answer(vectors))["relaxation"]
    state = plain.init(PROBLEM, 0)
    found = []
    for _ in range(150):
        state, report = plain.step(PROBLEM, state)
        assert -float(state["bound"]) + PROBLEM.graph.total / 2 >= optimum - 1e-8
        found.append(report.residual)
    metrics = PROBLEM.measure(plain.answer(state))
    assert metrics["relaxation"] <= optimum + 1e-8 <= metrics["bound"] + 2e-8
    assert metrics["gap"] < 0.08
    assert found[-1] < found[20] / 3


@pytest.mark.parametrize("penalty", ["quadratic", "soft_max"])
def test_gradients_and_exact_steps_are_those_of_differences(penalty: Any) -> None:
    objective, random = PenalisedCut(PROBLEM, penalty, 3.0, 5.0), np.random.default_rng(0)
    image, change = random.uniform(0.5, 1.5, 15), random.standard_normal(15)
    slope = (objective.value(image + 1e-6 * change) - objective.value(image - 1e-6 * change)) / 2e-6
    assert objective.gradient(image) @ change == pytest.approx(slope, rel=1e-7)
    step = objective.exact_step(image, np.sign(-slope) * change)
    values = [objective.value(image + t * np.sign(-slope) * change) for t in np.linspace(0, 1, 2001)]
    assert objective.value(image + step * np.sign(-slope) * change) <= min(values) + 1e-9


@pytest.mark.parametrize("fields", [{"penalty_weight": 0}, {"sharpness": -1}, {"step_rule": "best"}])
def test_bad_fields_are_refused(fields: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Hazan(**fields)
