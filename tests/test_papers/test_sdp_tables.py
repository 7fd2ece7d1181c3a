"""Tables of the semidefinite studies: slopes and comparisons of known rows, short solves, files to go on with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from narrowcast.solves.completion_problems import SyntheticCompletion
from narrowcast_papers.sdp import frank_wolfe as frank_wolfe_runs
from narrowcast_papers.sdp import localisation as localisation_runs
from narrowcast_papers.sdp.frank_wolfe import METHODS, TUNING_SEED, chosen, problem_of, solve_rows
from narrowcast_papers.sdp.localisation import MDS, RELAXED, TRUTH, classical_scaling, network_of, solved
from narrowcast_papers.sdp.tables import gap_slope, judge_completion, judge_localisation
from papers import targets


def rows_of(method: str, seed: int, error: float, power: float = -1.0) -> list[dict[str, object]]:
    return [
        {
            **{"data": "synthetic", "solver": method, "value": 1.0, "seed": seed, "iteration": k, "cpu_seconds": k},
            **{"residual": 3.0 * k**power, "objective": 1.0, "rank": k, "validation_rmse": error, "test_rmse": error},
        }
        for k in (1, 5, 10, 20, 40, 80)
    ]


def test_slopes_and_differences_are_those_of_known_rows() -> None:
    assert gap_slope(rows_of("hazan 1/k", 0, 1.0, -0.8)) == pytest.approx(-0.8, abs=1e-12)  # type: ignore[arg-type]
    rows = [
        row
        for place, method in enumerate(METHODS)
        for seed in range(3)
        for row in rows_of(method, seed, 1 + place + 0.01 * seed + 0.001 * place * (seed == 1))
    ]
    found = {each.what: each for each in judge_completion(rows)}
    assert found["synthetic, test RMSE, als"].difference == "+1.0003"
    assert found["synthetic, test RMSE, als"].verdict.startswith("higher, rank 80/80/80")
    assert found["synthetic, slope of the gap, hazan 1/k"].ours == "-1.00 ± 0.00"
    assert judge_completion(rows[:6]) == []


def test_settings_are_chosen_on_validation_entries_of_the_tuning_seed() -> None:
    values = METHODS["als"].values["synthetic"]
    rows = [
        {**rows_of("als", seed, 0.0)[-1], "value": value, "validation_rmse": error}
        for seed, shift in ((TUNING_SEED, 0), (0, 2))
        for value, error in zip(values, np.roll((3.0, 1.0, 2.0, 4.0), shift), strict=True)
    ]
    assert chosen(rows, "synthetic", "als") == values[1]
    assert chosen(rows[1:4], "synthetic", "als") is None


def test_a_short_solve_has_rows_whose_error_is_of_entries_that_no_solver_sees() -> None:
    problem = problem_of("synthetic", 0)
    assert problem.held_out is not None and problem.validation is not None
    seen = {*zip(problem.observed.row_of_entries().tolist(), problem.observed.indices.tolist(), strict=True)}
    for part in (problem.held_out, problem.validation):
        assert seen.isdisjoint(zip(part.row.tolist(), part.column.tolist(), strict=True))
    whole = SyntheticCompletion(rows=300, columns=200, rank=5, fraction=0.25, condition=3, noise=0.5, seed=0).load()
    assert isinstance(whole.truth, tuple)
    truth, noise = (
        whole.truth[0] @ whole.truth[1].T,
        0.5 * np.linalg.norm(whole.truth[0] @ whole.truth[1].T) / 60_000**0.5,
    )
    test, validation = (part.value - truth[part.row, part.column] for part in (problem.held_out, problem.validation))
    assert np.abs(test).max() < 1e-14 and np.std(validation) == pytest.approx(noise, rel=0.1)
    rows = list(solve_rows(problem, METHODS["als"].build(1e-3), 0, 5))
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[-1]["objective"] < rows[0]["objective"]


def test_scaling_of_complete_distances_without_noise_is_exact() -> None:
    problem = localisation_runs.SensorLocalisation(sensors=6, anchors=4, radio_range=2, noise=0, seed=1).load()
    assert problem.network.truth is not None
    np.testing.assert_allclose(classical_scaling(problem), problem.network.truth, atol=1e-9)


@pytest.mark.slow
def test_a_localisation_file_is_gone_on_with_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SENSORS", 8), ("SEEDS", 2), ("NOISES", (0.05,)), ("RANGES", (0.55,))):
        monkeypatch.setattr(localisation_runs, name, value)
    part = localisation_runs.MEASUREMENTS
    next(part.made([], tmp_path))
    methods = localisation_runs.METHODS
    assert len(list(part.made(part.read([tmp_path]), tmp_path))) == 2 * len(methods) - 1
    rows = part.read([tmp_path])
    assert list(part.missing(rows)) == []
    found = {each.what: each for each in judge_localisation(rows)}
    assert found[f"noise 0.05, range 0.55, {RELAXED}"].verdict.startswith("control, largest gap")
    wanted = network_of(0.05, 0.55, 1).measure(solved(network_of(0.05, 0.55, 1), MDS, 1))["test.position_rmse"]
    assert found[f"noise 0.05, range 0.55, {MDS}"].by_seed[1] == pytest.approx(wanted, rel=1e-5)


def test_steps_from_the_true_places_end_there_without_noise_and_at_a_minimum_with_it() -> None:
    for noise in (0.0, 0.1):
        problem = network_of(noise, 0.55, 1)
        truth, found = problem.network.truth, solved(problem, TRUTH, 1)["positions"]
        assert truth is not None
        assert np.abs(found - truth).max() < (1e-6 if not noise else 0.5)
        least = float(np.sum(problem.errors(found) ** 2))
        assert least <= float(np.sum(problem.errors(truth) ** 2))
        for seed in range(3):
            moved = found + 1e-4 * np.random.default_rng(seed).normal(size=found.shape)
            assert float(np.sum(problem.errors(moved) ** 2)) > least


def test_the_studies_are_targets() -> None:
    assert {"sdp-completion", "sdp-localisation"} <= targets().keys()
    assert len({*frank_wolfe_runs.MEASUREMENTS.columns}) == 11
