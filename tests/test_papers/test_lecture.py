"""Federated least squares: the lecture's closed forms, its bound, and the platform's runs beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from narrowcast_papers.lecture import bound as lecture_bound
from narrowcast_papers.lecture import fixed_point as lecture_fixed_point
from narrowcast_papers.lecture.bound import Descent, judge_descents, plain_loop, plot_descents, schedule_of
from narrowcast_papers.lecture.fixed_point import judge_limits, measure_case, measure_scaffold, plot_limits
from narrowcast_papers.lecture.problem import PRECISION, LeastSquaresProblem, configured

SMALL = "clients: 4, samples: 20, features: 2, scale_spread: 0.2"


def problem(data: str = SMALL) -> LeastSquaresProblem:
    experiment = configured(data)
    return LeastSquaresProblem.of(experiment.task(experiment.data_source.load()).data)


def test_the_problem_is_that_of_its_rows() -> None:
    found = problem()
    stacked, targets = found.rows.reshape(-1, 3), found.targets.ravel()
    assert found.solution == pytest.approx(np.linalg.lstsq(stacked, targets)[0], abs=1e-12)
    x = np.array([0.3, -2.0, 1.0])
    assert found.loss(x) == pytest.approx(np.mean((stacked @ x - targets) ** 2))
    assert found.gap(x) == pytest.approx(found.loss(x) - found.loss(found.solution))
    assert found.heterogeneity > 0.1
    assert problem(f"{SMALL}, heterogeneity: 0, noise: 0").heterogeneity == pytest.approx(0, abs=1e-10)


@pytest.mark.parametrize("steps", [1, 3, 40])
def test_equation_6_is_where_a_loop_of_rounds_ends(steps: int) -> None:
    found = problem()
    rate, x = 1 / found.smoothness, np.ones(3)
    for _ in range(400):
        own = np.tile(x, (4, 1))
        for _ in range(steps):
            own = own - rate * ((found.curvatures @ own[..., None])[..., 0] - found.linear)
        x = own.mean(axis=0)
    assert np.abs(x - found.fixed_point(rate, steps)).max() <= 1e-12
    assert 0 < found.contraction(rate, steps) < 1
    biased = np.linalg.norm(found.fixed_point(rate, steps) - found.solution) > 1e-3
    assert biased == (steps > 1)


def test_many_local_steps_end_at_the_mean_of_the_clients_solutions() -> None:
    found = problem()
    limit = found.fixed_point(1 / found.smoothness, 500)
    assert np.abs(limit - found.own_solutions.mean(axis=0)).max() <= 1e-10


def test_no_bias_without_different_solutions_or_without_different_curvatures() -> None:
    alike = problem(f"{SMALL}, heterogeneity: 0, noise: 0")
    assert np.abs(alike.fixed_point(1 / alike.smoothness, 10) - alike.solution).max() <= 1e-6
    found = problem()
    equal = replace(found, curvatures=np.broadcast_to(found.curvatures[:1], found.curvatures.shape))
    assert np.abs(equal.fixed_point(1 / equal.smoothness, 10) - equal.solution).max() <= 1e-12


@pytest.mark.slow
def test_the_platform_ends_where_the_closed_form_says_and_scaffold_at_the_solution(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"SCAFFOLD_STEPS": 3, "_SCAFFOLD_ROUNDS": 150}.items():
        monkeypatch.setattr(lecture_fixed_point, name, value)
    strong = {spread: measure_case(f"{SMALL}, heterogeneity: {spread:g}", (2, 20)) for spread in (1.0, 0.0)}
    convex = {"many": measure_case("clients: 2, samples: 1, features: 3, scale_spread: 0", (5,))}
    limits = [limit for case in (*strong.values(), *convex.values()) for limit in case.limits.values()]
    assert max(limit.error for limit in limits) <= PRECISION
    assert strong[1.0].limits[20].bias > strong[1.0].limits[2].bias > 1e-2
    scaffold = measure_scaffold(f"{SMALL}, heterogeneity: 1")
    assert scaffold.error <= PRECISION
    said = judge_limits(strong, convex, scaffold)
    assert all("equals" in verdict.verdict for verdict in said)
    assert (said[0].paper, said[-1].paper) == (f"bias {strong[1.0].limits[2].bias:.3g}", "no bias")
    monkeypatch.setattr(lecture_fixed_point, "SPREADS", (1.0,))
    plot_limits(strong, scaffold, tmp_path / "limits.png")
    assert (tmp_path / "limits.png").stat().st_size > 10_000


def test_the_error_is_below_theorem_1_and_a_larger_one_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"STRONG": SMALL, "LOCAL_STEPS": 200, "REPETITIONS": 3}.items():
        monkeypatch.setattr(lecture_bound, name, value)
    full, sampled = lecture_bound.measure_descent(1.0, 5), lecture_bound.measure_sampled()
    assert (full.bound > full.measured).all()
    assert (sampled.bound > sampled.measured).all()
    assert full.apart <= PRECISION
    noise, heterogeneity, drift = full.summands
    assert (noise, min(heterogeneity, drift) > 0, sampled.summands[0] > 0) == (0, True, True)
    descents: dict[float, list[Descent]] = {1.0: [full], 0.0: [replace(full, bound=full.measured / 2)]}
    verdicts = [each.verdict for each in judge_descents(descents, sampled)]
    assert verdicts[0].startswith("above the error in all 40 rounds measured")
    assert verdicts[1].startswith("below the error in 40 rounds")
    plot_descents(descents, sampled, tmp_path / "bound.png")
    assert (tmp_path / "bound.png").stat().st_size > 10_000


def test_the_loop_takes_the_theorems_steps() -> None:
    found, first = problem(), np.ones(3)
    alpha, gamma = schedule_of(found, 20)
    assert gamma == max(8 * found.smoothness / alpha, 20)
    own = np.tile(first, (4, 1))
    for t in (1, 2):
        own = own - 2 / (alpha * (gamma + t)) * ((found.curvatures @ own[..., None])[..., 0] - found.linear)
    assert plain_loop(found, first, 2).models[1] == pytest.approx(own.mean(axis=0), abs=1e-12)
