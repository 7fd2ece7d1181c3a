"""The table of baselines: no measurement of it is missing, and a row is what its data give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from narrowcast.platform.data.rating_matrix import ExplicitRatings
from narrowcast.platform.models.rating_baselines import USER_MEAN
from narrowcast.studies.results import read_lines
from narrowcast.studies.tables import Effort, MeasuredTable
from narrowcast_papers.fedmavg import baselines as baseline_runs
from papers import targets


def test_no_measurement_is_missing_and_shares_are_in_percent(tmp_path: Path) -> None:
    target = targets()["rating-baselines"]
    table = target.table()
    assert isinstance(table, MeasuredTable)
    rows = table.rows(target.results, tmp_path, Effort(seconds=0))
    assert list(table.parts[0].missing(rows[0])) == []
    found = {each.what: each for each in table.finish(rows, tmp_path / "table")[0]}
    assert found["ml-1m, items, popularity, hr@10"].ours == "45.20 ± 0.00"
    assert found["ml-1m, items, popularity, hr@10"].verdict == "the same for every seed"
    for case in ("ml-100k, stars", "ml-latest-small, stars"):
        assert len(found[f"{case}, {USER_MEAN}, rmse"].by_seed) == baseline_runs.SEEDS


@pytest.mark.data("ml-latest-small")
def test_a_row_is_the_mean_of_each_users_ratings_of_the_split_of_its_seed() -> None:
    rows = read_lines(targets()["rating-baselines"].results / "rating-baselines.csv")
    wanted = [row for row in rows if (row["case"], row["seed"]) == ("ml-latest-small, stars", "2")]
    data = ExplicitRatings(set="ml-latest-small", validation_share=0.1, seed=2).load()
    train, test = data.part("train"), data.part("test")
    means = np.array([train.values[train.users == user].mean() for user in range(data.n_users)])
    error = np.sqrt(np.mean((means[test.users] - test.values) ** 2))
    assert float(next(row["value"] for row in wanted if row["baseline"] == USER_MEAN)) == pytest.approx(error, rel=1e-5)
    measured = {
        line["metric"]: line["value"]
        for line in baseline_runs.measured("ml-latest-small, stars", 2)
        if line["baseline"] == USER_MEAN
    }
    assert measured["test.rmse"] == pytest.approx(error)
