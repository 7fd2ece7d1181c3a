"""What clients keep: rows of large arrays, in memory or in a sparse file, of which only touched ones cost anything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest

from narrowcast.platform.rounds import state
from narrowcast.platform.rounds.opening import sample_cohort
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Population


def test_rows_are_put_and_taken_and_the_initial_arrays_stay_as_they_were() -> None:
    initial = {"a": np.arange(12.0).reshape(6, 2), "b": np.broadcast_to(np.float32(0), (6, 3))}
    clients = Population.fresh(initial, 6)
    clients.put(np.array([4, 1]), {"a": np.array([[9, 9], [8, 8]]), "b": np.ones((2, 3))})
    taken = clients.take(np.array([1, 0, 4]))
    assert taken["a"].tolist() == [[8, 8], [0, 1], [9, 9]]
    assert taken["b"].tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 1]]
    assert initial["a"].tolist() == np.arange(12).reshape(6, 2).tolist()
    assert not initial["b"].any()
    taken["a"][:] = -1
    assert clients.arrays["a"][1].tolist() == [8, 8]


def test_participants_are_those_that_have_a_last_round() -> None:
    clients = Population.fresh({}, 5)
    assert not len(clients.participants())
    clients.last_round[[3, 0]] = 2
    assert clients.participants().tolist() == [0, 3]


def test_a_broadcast_zero_takes_no_memory_until_it_is_touched() -> None:
    before = psutil.Process().memory_info().rss
    clients = Population.fresh({"control": np.broadcast_to(np.float32(0), (10**6, 500))}, 10**6)  # 2 GB if touched
    clients.put(np.array([5, 999_999]), {"control": np.ones((2, 500))})
    assert psutil.Process().memory_info().rss - before < 100e6
    assert clients.take(np.array([999_999, 7]))["control"].sum(axis=1).tolist() == [500, 0]


def test_above_the_limit_rows_live_in_a_sparse_file_that_goes_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(state, "SHARE_OF_MEMORY", 1e-9)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    clients = Population.fresh({"control": np.broadcast_to(np.float32(0), (10**6, 50))}, 10**6)
    assert isinstance(clients.arrays["control"], np.memmap)
    clients.put(np.array([0, 123_456]), {"control": np.full((2, 50), 3)})
    assert clients.take(np.array([123_456, 123_457]))["control"][:, 0].tolist() == [3, 0]
    assert not list(tmp_path.iterdir())  # it has no name, so no crash leaves it behind


def test_arrays_that_are_too_large_together_live_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = {name: np.broadcast_to(np.float32(0), (1000, 60)) for name in ("errors", "warm")}
    share = 300_000 / psutil.virtual_memory().available  # either is 240 kB
    monkeypatch.setattr(state, "SHARE_OF_MEMORY", share)
    assert not isinstance(Population.fresh({"errors": zeros["errors"]}, 1000).arrays["errors"], np.memmap)
    both = Population.fresh({**zeros, "factors": np.ones((1000, 2))}, 1000).arrays
    assert [isinstance(each, np.memmap) for each in both.values()] == [True, True, False]


@pytest.mark.parametrize("sampling", ["uniform", "round_robin"])
def test_a_cohort_of_a_million_is_distinct_and_drawn_from_all(sampling: str) -> None:
    plan = Plan(clients_per_round=1000, sampling=sampling)
    order = plan.sampling.order(plan.seed, 10**6)
    cohorts = np.array([sample_cohort(plan, order, round_index) for round_index in range(1, 21)])
    assert all(len(set(cohort)) == 1000 for cohort in cohorts)
    assert np.histogram(cohorts, bins=4, range=(0, 10**6))[0].min() > 4500
