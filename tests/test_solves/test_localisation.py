"""Sensor localisation: exact recovery, bounds against other matrices, plain loops, files, resumption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Arrays
from narrowcast.solves.localisation import LiftedStress, Localisation, SensorDistances, SensorLocalisation
from narrowcast.solves.max_cut import RandomMaxCut

NOISY = SensorLocalisation(sensors=14, anchors=5, radio_range=0.6, noise=0.1, seed=3).load()


def solved(solver: LiftedStress, problem: Localisation, most: int = 300) -> Arrays:
    state = solver.init(problem, 0)
    for _ in range(most):
        state, report = solver.step(problem, state)
        if report.status != "running":
            break
    return state


def dense_stress(problem: Localisation, lifted: Any) -> float:
    network, total = problem.network, 0.0
    for (i, j), distance in zip(network.pairs.tolist(), network.distances, strict=True):
        other = lifted[j] if j < network.sensors else np.zeros(lifted.shape[1])
        if j >= network.sensors:
            other[: network.dimension] = network.anchors[j - network.sensors]
        total += (np.sum((lifted[i] - other) ** 2) - distance**2) ** 2
    return float(total)


@pytest.mark.parametrize("dimension", [2, 3])
def test_distances_without_noise_give_the_positions_at_the_rank_of_the_space(dimension: Any) -> None:
    problem = SensorLocalisation(sensors=15, anchors=8, dimension=dimension, radio_range=0.8, noise=0, seed=1).load()
    solver = LiftedStress(refine=False)
    metrics = problem.measure(solver.answer(solved(solver, problem)))
    assert metrics["test.position_rmse"] < 1e-4
    assert metrics["gap"] <= 1e-10


def test_metrics_are_those_of_plain_loops_and_dense_matrices() -> None:
    lifted = np.random.default_rng(0).standard_normal((14, 4))
    metrics = NOISY.measure({"positions": lifted[:, :2], "lifted": lifted})
    assert metrics["objective"] == pytest.approx(dense_stress(NOISY, lifted), rel=1e-12)
    assert metrics["stress"] == pytest.approx(dense_stress(NOISY, lifted[:, :2]), rel=1e-12)
    gram = np.block([[np.eye(2), lifted[:, :2].T], [lifted[:, :2], lifted @ lifted.T]])
    np.testing.assert_allclose(NOISY.squared.of_matrix(gram) - NOISY.network.distances**2, NOISY.errors(lifted))
    assert metrics["rank"] == 4


def test_the_bound_is_below_every_matrix_and_met_by_the_relaxation() -> None:
    best = NOISY.measure(LiftedStress().answer(solved(LiftedStress(), NOISY)))
    assert -1e-12 <= best["gap"] <= 1e-7
    assert best["stress"] >= best["objective"] >= best["bound"]
    random = np.random.default_rng(1)
    assert NOISY.network.truth is not None
    for scale in (0.0, 0.01, 0.1, 1.0):
        near = NOISY.network.truth + scale * random.standard_normal((14, 2))
        lifted = np.hstack([near, scale * random.standard_normal((14, 3))])
        assert NOISY.bound(lifted) <= best["objective"] * (1 + 1e-9)
        assert float(np.sum(NOISY.errors(lifted) ** 2)) >= best["bound"]


def test_refined_positions_are_a_minimum_of_the_stress_in_the_space() -> None:
    plain = solved(LiftedStress(refine=False), NOISY)["positions"]
    refined = solved(LiftedStress(), NOISY)["positions"]
    at = dense_stress(NOISY, refined)
    assert at <= dense_stress(NOISY, plain)
    for place in np.ndindex(*refined.shape):
        for change in (-1e-5, 1e-5):
            moved = refined.copy()
            moved[place] += change
            assert dense_stress(NOISY, moved) >= at


def test_the_linear_program_has_the_errors_as_its_objective() -> None:
    program, network = NOISY.program, NOISY.network
    assert network.truth is not None
    errors = NOISY.errors(network.truth)
    slack = np.sqrt(np.concatenate([np.maximum(errors, 0), np.maximum(-errors, 0)]))
    vectors = np.zeros((2 + 14 + len(slack), 2 + len(slack)))
    vectors[:2, :2], vectors[2:16, :2] = np.eye(2), network.truth
    vectors[16:, 2:] = np.diag(slack)
    metrics = NOISY.measure({"vectors": vectors})
    assert metrics["infeasibility"] < 1e-13
    assert metrics["objective"] == pytest.approx(np.abs(errors).sum(), rel=1e-12)
    assert metrics["test.position_rmse"] < 1e-14 and metrics["rank"] == 2
    assert program.trace_bound is not None and program.trace_bound >= float(np.sum(vectors**2))
    assert program.bound(np.zeros(len(program.targets))) <= 0


def test_a_solve_goes_on_from_its_arrays_to_the_bit() -> None:
    solver = LiftedStress()
    whole = part = solver.init(NOISY, 0)
    for iteration in range(25):
        whole, _ = solver.step(NOISY, whole)
        part, _ = solver.step(NOISY, part)
        part = {name: np.array(each, order="C") for name, each in part.items()}
        if iteration == 12:
            part = {name: np.frombuffer(each.tobytes(), each.dtype).reshape(each.shape) for name, each in part.items()}
    assert all(np.array_equal(part[name], whole[name]) for name in whole)


FILE = """# a square
anchor a 0 0
anchor b 1 0
anchor c 0 1
sensor s 0.5 0.5
distance a s 0.7071067811865476
distance b s 0.7071067811865476
distance s c 0.7071067811865476
distance a b 1
"""


def test_a_file_has_its_own_network(tmp_path: Path) -> None:
    path = tmp_path / "square.txt"
    path.write_text(FILE)
    problem = SensorDistances(path=path).load()
    assert problem.sizes == {"sensors": 1, "anchors": 3, "distances": 3}
    solver = LiftedStress()
    metrics = problem.measure(solver.answer(solved(solver, problem)))
    assert metrics["test.position_rmse"] < 1e-6


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("anchor a 0 0", "anchor a 0", "line 2 is 'anchor a 0'; give lines"),
        ("anchor a 0 0", "anchor a 0 nan", "line 2: '0 nan' is not a list of finite numbers"),
        ("anchor a 0 0", "anchor a 0 0 0", "positions of two and of three coordinates"),
        ("anchor b 1 0", "anchor a 1 0", "line 3: a is given twice; keep one"),
        ("distance a b 1", "distance s a 1", "give each pair of two nodes once"),
        ("distance a b 1", "distance a b -1", "lengths > 0"),
        ("distance a b 1", "distance x y 1", "sensor 2 and 1 others have no path of measured distances to an anchor"),
        ("anchor", "#", "has 0 anchors and 4 sensors with distances; give both"),
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "network.txt"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(UserError, match=said):
        SensorDistances(path=path).load()


def test_bad_fields_and_combinations_are_refused() -> None:
    with pytest.raises(UserError, match=r"no path of measured distances.*larger radio range"):
        SensorLocalisation(sensors=30, radio_range=0.02).load()
    with pytest.raises(UserError, match=r"solver\.dimensions is 2, but the sensors are in 3; raise it"):
        LiftedStress(dimensions=2).check(SensorLocalisation(dimension=3, radio_range=1, sensors=5).load())
    with pytest.raises(UserError, match="solves sensor localisation, not random_max_cut"):
        LiftedStress().check(RandomMaxCut(vertices=6, edges=8).load())
    for fields in ({"radio_range": 0}, {"noise": -0.1}, {"anchors": 0}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            SensorLocalisation(**fields)
