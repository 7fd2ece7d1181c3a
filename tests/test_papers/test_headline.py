"""Which upload for which budget: the search of the rates, accuracy at a budget, sizes under masks, published tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from command_line import narrowcast
from narrowcast.platform.data.movielens import MovieLens100K
from narrowcast.studies.execution import Planned, light_run
from narrowcast_papers.headline import secure as headline_secure
from narrowcast_papers.headline.contest import OPEN, START, TEST_SEEDS, TUNING_SEEDS, Rates, neighbours, searched
from narrowcast_papers.headline.secure import SCHEMES, UPLOADS, judge_sums, upload_kilobytes
from narrowcast_papers.headline.table import accuracy_within, judge_contest, traffic
from papers import PAPERS, queue_of
from planned_runs import ended

PEAK = (2.0, 8.0)
NAMES = (OPEN.name, headline_secure.STUDY)


def rates_of(planned: Planned) -> Rates:
    """Return the rates of a run as its experiment has them."""
    experiment = planned.spec.configured(planned.seed, "x")
    return experiment.training.learning_rate, experiment.algorithm.server_learning_rate  # type: ignore[attr-defined]


def result(planned: Planned) -> dict[str, Any]:
    """Return a result that falls with the distance from PEAK, in factors of two, and differs by seed."""
    if planned.spec.measure == "popularity":
        return {"rounds": 0, "final": {"test.hr@10": 0.4}, "downlink_bits": 0}
    distance = sum(abs(np.log2(one / other)) for one, other in zip(rates_of(planned), PEAK, strict=True))
    accuracy = 0.6 - 0.01 * distance + 1e-3 * (planned.seed % 100)
    costs = {"uplink_bits": 160_000, "downlink_bits": 80_000, "simulated_seconds": 0.2}
    rounds = int(dict(each.split("=", 1) for each in planned.spec.overrides)["rounds"])
    curve = [
        {
            "rounds": at,
            **{name: at * cost for name, cost in costs.items()},
            "final": {"test.hr@10": accuracy * at / 200},
        }
        for at in (10, 100, 200)
    ]
    final = {"validation.hr@10": accuracy, "test.hr@10": accuracy}
    return {"rounds": rounds, "final": final, "curve": curve, **{name: rounds * cost for name, cost in costs.items()}}


@pytest.mark.slow
def test_every_upload_goes_to_the_best_rates_by_the_same_steps(tmp_path: Path) -> None:
    queue = queue_of(*NAMES, folder=tmp_path)
    jobs = [planned for job in ended(queue, result) for planned in job]
    best, tried = searched(queue.rows, OPEN.cells[0])
    assert best == PEAK
    assert {*neighbours(PEAK), PEAK, START} < set(tried), "no best value is at the edge of what was tried"
    tuning, test = ([each for each in jobs if each.test == wanted] for wanted in (False, True))
    assert {each.seed for each in tuning} == set(range(100, 100 + TUNING_SEEDS))
    assert {each.seed for each in test} == set(range(TEST_SEEDS))
    assert len(tuning) == TUNING_SEEDS * len(tried) * len(OPEN.uploads)
    open_runs = TEST_SEEDS * len(OPEN.uploads) * len(OPEN.conditions)
    assert len(test) == 1 + open_runs + (1 + TEST_SEEDS) * len(UPLOADS)
    assert {rates_of(each) for each in test if each.spec.measure == "accuracy"} == {PEAK}
    condition, second = next(iter(OPEN.conditions)), OPEN.cells[1].upload
    said = {each.what: each for each in judge_contest(OPEN, queue.rows)}
    half = said[f"{condition}, 20 s: {second}"]
    assert half.by_seed == pytest.approx([30, 30.05, 30.1, 30.15, 30.2]), "half of the rounds"
    assert half.difference == "+0.00"
    assert said["popularity"].ours == "40.00"
    hidden = {each.what: each for each in judge_sums(queue.rows)}
    assert hidden["masks, 80 s: SCoLR"].by_seed == pytest.approx([60, 60.1, 60.2, 60.3, 60.4]), "200 rounds of 0.2 s"
    assert hidden["masks, last round: SCoLR"].by_seed == pytest.approx([60, 60.1, 60.2, 60.3, 60.4])


def test_accuracy_at_a_budget_is_linear_between_evaluations_and_ends_with_the_run() -> None:
    points = [(10, 0.2), (20, 0.4), (40, 0.5)]
    curve = [
        {"uplink_bits": 6e6 * size, "downlink_bits": 2e6 * size, "final": {"test.hr@10": value}}
        for size, value in points
    ]
    budgets = [9.9, 10, 15, 30, 40, 1000]
    assert [accuracy_within(curve, traffic, each) for each in budgets] == pytest.approx([0, 20, 30, 45, 50, 50])


def test_uploads_of_the_open_contest_differ_in_the_algorithm_alone() -> None:
    first, *others = [cell.test(START, next(iter(OPEN.conditions))).configured(0, "x").plain() for cell in OPEN.cells]
    for other in others:
        differ = {name for name in first if first[name] != other[name]}
        assert differ <= {"algorithm", "model"}
        assert other["algorithm"]["download"]["rows"] == "touched"


def test_sizes_are_the_integers_the_keys_and_the_ciphertexts() -> None:
    items, cohort = 1682, 60
    column, counts = items * (8 + 6) / 8, items * 6 / 8  # a sum over 60 clients has 6 bits more
    plain, masks = (
        {n: upload_kilobytes(SCHEMES[kind], n, n, by_column=False) for n in (1, 4)} for kind in ("plain", "masks")
    )
    for columns, size in plain.items():
        assert 1e3 * size == pytest.approx(columns * column + counts, abs=100), "a signature and a header"
    keys = masks[1] - plain[1]
    assert keys == pytest.approx(masks[4] - plain[4]), "keys and shares do not depend on the update"
    assert 1e3 * keys > 2 * 32 * cohort, "a share for each client, and one back"
    assert upload_kilobytes(SCHEMES["CKKS"], 1, 1, by_column=False) > 8192 * 60 / 8e3, "a polynomial of 8192 residues"
    by_column = upload_kilobytes(SCHEMES["plain"], 16, 3, by_column=True)
    assert 1e3 * by_column == pytest.approx(3 * (column + counts), abs=200)


@pytest.mark.data("ml-100k")
def test_clients_under_masks_choose_the_ranks_that_they_choose_in_the_clear() -> None:
    plain, masked = (
        light_run(spec, 0, rounds=1)
        for spec in (UPLOADS["SCoLR"].plain("SCoLR", START), UPLOADS["SCoLR"].masked("SCoLR", START))
    )
    assert plain["model_sha256"] == masked["model_sha256"]
    assert masked["uplink_bits"] > plain["uplink_bits"], "keys and shares"


@pytest.mark.parametrize("name", NAMES)
def test_the_published_table_has_every_run(name: str, tmp_path: Path) -> None:
    assert not list(queue_of(OPEN.name, name).missing())
    words = ("reproduce", name, "--papers", PAPERS, "--time-limit", 0, "--output", tmp_path)
    assert narrowcast(*words).status == 0
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_published_differences_are_paired_by_seed() -> None:
    rows = queue_of(OPEN.name).rows
    said, condition = {each.what: each for each in judge_contest(OPEN, rows)}, next(iter(OPEN.conditions))
    for cell in OPEN.cells:
        best, _ = searched(rows, cell)
        assert best is not None
        shown, reference = (said[f"{condition}, 200 rounds: {each}"] for each in (cell.upload, OPEN.reference))
        label = cell.test(best, condition).label
        own = [row["final"]["test.hr@10"] for row in rows.of_stem(label)]
        assert sorted(shown.by_seed) == pytest.approx(sorted(100 * each for each in own))
        if cell.upload != OPEN.reference:
            interval = stats.ttest_rel(shown.by_seed, reference.by_seed).confidence_interval()
            assert f"{interval.low:+.2f} to {interval.high:+.2f}" in shown.verdict


@pytest.mark.data("ml-100k")
def test_popularity_ranks_by_the_number_of_training_users() -> None:
    found, data = light_run(OPEN.baseline, 0), MovieLens100K(seed=0).load()
    counts = np.bincount(data.items, minlength=data.n_items).tolist()
    hits = [
        sum(counts[other] >= counts[item] for other in others) < 10
        for item, others in zip(data.test.tolist(), data.negatives.tolist(), strict=True)
    ]
    assert found["final"]["test.hr@10"] == pytest.approx(np.mean(hits))
    assert found["uplink_bits"] == found["downlink_bits"] == 0
