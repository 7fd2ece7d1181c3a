"""The studies of FedMAvg and SFMF: the published central numbers, the tables of the runs in the repository."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import normalized_mutual_info_score

from narrowcast.platform.models.factorisation import accuracy_of_clusters, mutual_information
from narrowcast.solve_run import load_solve
from narrowcast.solves.completion_problems import HeldOut
from narrowcast.studies.execution import light_run
from narrowcast_papers.fedmavg import central as fedmavg_central
from narrowcast_papers.fedmavg import items as fedmavg_items
from narrowcast_papers.fedmavg import sfmf as sfmf_excerpt
from narrowcast_papers.fedmavg.sfmf import judge_sfmf
from narrowcast_papers.fedmavg.table import item_runs, judge_items, plot_items
from papers import queue_of


@pytest.mark.data("ml-latest-small")
def test_the_central_program_gives_the_digits_of_the_released_log() -> None:
    central = sfmf_excerpt.run_central()
    assert central.loss == pytest.approx(0.732655866937412, abs=1e-14)
    assert central.rmse == pytest.approx(1.3969165, abs=1e-7)


def test_no_run_of_the_tables_is_missing() -> None:
    for study in (fedmavg_items.STUDY, "fedmavg-clustering"):
        queue = queue_of(study)
        assert not list(queue.missing()), study


@pytest.mark.data("ml-latest-small")
def test_the_central_solve_has_the_ratings_of_the_clients_and_its_row_is_what_it_gives() -> None:
    rows = queue_of(fedmavg_items.STUDY).rows
    central = fedmavg_central.LEAST_SQUARES
    results = [rows[central.tuning(decay), 100] for decay in central.values]
    spec, seed = central.test(results), 3
    problem = load_solve(spec.experiment, [*spec.overrides, f"seed={seed}"]).problem_source.load()
    clients = fedmavg_items.cell("m = 10").test([{"final": {}}]).configured(seed, "one").data_source.load()
    assert isinstance(problem.held_out, HeldOut) and isinstance(problem.validation, HeldOut)
    for split, held in (("test", problem.held_out), ("validation", problem.validation)):
        part = clients.part(split)
        assert np.array_equal(part.items, held.row) and np.array_equal(part.users, held.column)
        assert np.array_equal(part.values, held.value)
    found = light_run(spec, seed)["final"]
    assert found["test.rmse"] == pytest.approx(rows[spec, seed]["final"]["test.rmse"], abs=1e-9)
    assert "test.rmse" not in light_run(spec, seed, test=False)["final"]


def test_the_table_of_items_has_all_settings_and_differences(tmp_path: Path) -> None:
    rows = queue_of(fedmavg_items.STUDY).rows
    verdicts = {each.what: each for each in judge_items(rows)}
    assert {cell.name for cell in fedmavg_items.CELLS} < set(verdicts)
    assert verdicts["central, alternating least squares"].ours == "0.8979 ± 0.0028"
    assert verdicts["m = 10"].ours.startswith("0.978")
    assert verdicts["m = 10 less m = 610"].verdict.endswith("at 1/61.6 of its uplink")
    assert verdicts["m = 610, rated rows, quantised less m = 610"].verdict.startswith("level")
    assert verdicts["30 users a client, Q = 20, 5 rounds less 30 users a client, Q = 0, 5 rounds"].verdict[:3] == "off"
    by_name = {cell.name: each for cell, each in item_runs(rows).items()}
    for count in (10, 610):
        whole, rated = by_name[f"m = {count}"], by_name[f"m = {count}, rated rows"]
        assert [each["model_sha256"] for each in whole.runs] == [each["model_sha256"] for each in rated.runs]
    plot_items(rows, tmp_path / "items.png")
    assert (tmp_path / "items.png").stat().st_size > 10_000


@pytest.mark.data("ml-latest-small")
def test_the_table_of_sfmf_judges_what_is_finished() -> None:
    verdicts = {each.what: each for each in judge_sfmf(queue_of(sfmf_excerpt.STUDY).rows)}
    assert verdicts["central, test RMSE"].verdict == "reproduced, within 1e-07"
    assert verdicts["full, float64"].verdict.startswith("reproduced, within 1e-05; uplink 39.2 MB")
    assert verdicts["full, ckks"].by_seed == verdicts["full, masked"].by_seed == verdicts["full, plain"].by_seed


def test_agreement_of_clusters_does_not_depend_on_their_numbers() -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 5, 300)
    clusters = np.where(random.random(300) < 0.7, (labels * 3 + 1) % 5, random.integers(0, 7, 300))
    assert mutual_information(clusters, labels) == pytest.approx(normalized_mutual_info_score(labels, clusters))
    assert accuracy_of_clusters((labels * 3 + 1) % 5, labels) == 1
    assert accuracy_of_clusters(clusters, labels) == accuracy_of_clusters(6 - clusters, labels)
    assert 0.65 < accuracy_of_clusters(clusters, labels) < 0.75
    assert mutual_information(np.zeros(9, dtype=np.int64), np.zeros(9, dtype=np.int64)) == 1
