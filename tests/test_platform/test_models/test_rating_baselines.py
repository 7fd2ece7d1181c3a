"""Baselines of ratings against plain loops and the normal equations, and their rows beside the runs that train."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import narrowcast as nc
from narrowcast.platform.data.rating_matrix import ExplicitRatings
from narrowcast.platform.models.factorisation import MatrixFactorisation
from narrowcast.platform.models.rating_baselines import BIASES, USER_MEAN, rating_baselines
from narrowcast.runs.outputs import baselines_entry
from per_client import synthetic

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
RMSE = "test.rmse"


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 400 ratings by 20 users of 40 items, whose stars follow from both."""
    random = np.random.default_rng(3)
    of_users, of_items = random.normal(size=20), random.normal(size=40)
    pairs = random.permutation(20 * 40)[:400]
    path = tmp_path_factory.mktemp("ratings") / "stars.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("user", "item", "rating"))
        for user, item in (divmod(int(pair), 40) for pair in pairs):
            stars = round(3 + of_users[user] + of_items[item] + random.normal(scale=0.3))
            writer.writerow((user, item, min(5, max(1, stars))))
    return path


def source(path: Path, seed: int = 0) -> ExplicitRatings:
    return ExplicitRatings(path=path, time=None, test_share=0.2, validation_share=0.1, seed=seed)


def test_the_mean_of_each_user_is_that_of_its_own_training_ratings(ratings: Path) -> None:
    data = source(ratings).load()
    users, _, values = data.part("train")
    found = rating_baselines(data)[USER_MEAN]
    for split in ("validation", "test"):
        squares, sizes = [], []
        for user, _, value in zip(*data.part(split), strict=True):  # type: ignore[arg-type]
            own = [v for u, v in zip(users, values, strict=True) if u == user]
            error = sum(own) / len(own) - value
            squares.append(error**2)
            sizes.append(abs(error))
        assert found[f"{split}.rmse"] == pytest.approx(np.sqrt(np.mean(squares)), rel=1e-12)
        assert found[f"{split}.mae"] == pytest.approx(np.mean(sizes), rel=1e-12)


def test_biases_are_the_ridge_fit_of_both_clipped_to_the_stars(ratings: Path) -> None:
    data = source(ratings).load()
    users, items, values = data.part("train")
    design = np.zeros((len(values), data.n_items + data.n_users))
    design[np.arange(len(values)), items] = design[np.arange(len(values)), data.n_items + users] = 1
    biases = np.linalg.solve(design.T @ design + 5 * np.eye(design.shape[1]), design.T @ (values - values.mean()))
    users, items, values = data.part("test")
    predicted = (data.training_mean + biases[items] + biases[data.n_items + users]).clip(1, 5)
    found = rating_baselines(data)
    assert found[BIASES][RMSE] == pytest.approx(np.sqrt(np.mean((predicted - values) ** 2)), rel=1e-8)
    assert found[BIASES][RMSE] < found[USER_MEAN][RMSE] - 0.1


def test_popularity_ranks_by_the_number_of_training_users_and_ties_lose() -> None:
    data = synthetic(list(range(3, 23)), n_items=130)
    counts = [sum(item == other for other in data.items) for item in range(data.n_items)]
    hits, gains = [], []
    for user, item in enumerate(data.test):
        rank = sum(counts[other] >= counts[item] for other in data.negatives[user])
        hits.append(rank < 10)
        gains.append(1 / np.log2(rank + 2) if rank < 10 else 0)
    found = MatrixFactorisation().baselines(data)["popularity"]
    assert 0 < found["test.hr@10"] == pytest.approx(np.mean(hits))
    assert found["test.ndcg@10"] == pytest.approx(np.mean(gains))


def federated(path: Path, seed: int) -> dict[str, Any]:
    return {
        "data": {"kind": "explicit_ratings", "path": str(path), "time": None},
        "model": {"kind": "masked_factorisation", "rank": 2},
        "algorithm": "fedmavg",
        "training": "alternating_gradient",
        "clients_per_round": 20,
        "rounds": 1,
        "seed": seed,
        "data.seed": seed,
        "name": f"federated-seed-{seed}",
    }


@pytest.mark.slow
def test_runs_and_solves_of_ratings_have_the_rows_of_their_baselines(ratings: Path, tmp_path: Path) -> None:
    runs = [nc.run("fedavg-digits", federated(ratings, seed), output=tmp_path, progress=False) for seed in (0, 1)]
    datas = [ExplicitRatings(path=ratings, time=None, seed=seed).load() for seed in (0, 1)]
    wanted = [rating_baselines(data)[USER_MEAN][RMSE] for data in datas]
    assert [run.baselines[USER_MEAN][RMSE] for run in runs] == pytest.approx(wanted)
    assert f"test RMSE {wanted[0]:.4g}" in dict(runs[0].summary())[f"baseline: {USER_MEAN}"]
    table = nc.compare(runs).results_table()
    row = next(row for row in table.rows if tuple(row[:2]) == (USER_MEAN, "baseline"))
    head = next(place for place, name in enumerate(table.heads) if name.replace("\n", " ") == "test RMSE")
    assert row[head] == f"{np.mean(wanted):.4g} ± {np.std(wanted, ddof=1):.2g}"
    assert len(table.rows) == 1 + 2
    problem = {
        "kind": "rating_completion",
        "ratings": {"set": None, "path": str(ratings), "time": None},
        "bias_decay": 5,
    }
    overrides = {"problem": problem, "solver.rank": 2, "iterations": 3, "name": "central"}
    solved = nc.solve("ratings-ml100k", overrides, output=tmp_path, progress=False)
    assert solved.baselines[USER_MEAN] == pytest.approx({RMSE: wanted[0]})
    rows = [list(row[:2]) for row in nc.compare([solved]).results_table().rows][1:]
    assert rows == [[USER_MEAN, "baseline"], [BIASES, "baseline"]]


class Others:
    """A class of somebody else that may have an attribute of this name, or a method that fails."""

    def __init__(self, baselines: Any) -> None:
        self.baselines = baselines


def test_what_others_have_under_this_name_does_not_end_a_run(caplog: pytest.LogCaptureFixture) -> None:
    assert baselines_entry(Others(["float32"])) == baselines_entry(Others(dict), 1) == {}
    assert caplog.text.count("the baselines of Others are left out: TypeError") == 2
    measured = {"guess": {"test.rmse": np.float32(0.5), "test.mae": float("nan")}, "nothing": {}}
    assert baselines_entry(Others(lambda _: measured), None) == {"baselines": {"guess": {"test.rmse": 0.5}}}


def test_runs_on_samples_have_none(tmp_path: Path) -> None:
    run = nc.run("fedavg-digits", {"rounds": 1}, output=tmp_path, progress=False)
    assert run.baselines == {}
    assert len(nc.compare([run]).results_table().rows) == 1
