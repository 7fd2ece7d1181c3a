"""Cuts of a finished MAXCUT solve: in process and on actors of Ray, of which one is killed."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import narrowcast as nc
from narrowcast.api.cut_rounding import _Parts, _round_part
from narrowcast.cluster.worker_pool import LocalPool, WorkerDied, dispatch
from narrowcast.platform.errors import UserError
from ray_actors import actor_processes, kill_one

# MLflow's SQL store uses what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
SOLVE = """
problem: {kind: random_max_cut, vertices: VERTICES, edges: EDGES, roundings: 50, seed: 5}
solver: {kind: mixing, momentum: 0.45}
iterations: 30
"""


def solved(folder: Path, vertices: int, edges: int) -> nc.SolveResult:
    file = folder / "cut.yaml"
    file.write_text(SOLVE.replace("VERTICES", str(vertices)).replace("EDGES", str(edges)))
    result = nc.solve(file, {"tracking.system_metrics": False}, output=folder, progress=False)
    assert isinstance(result, nc.SolveResult)
    return result


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> nc.SolveResult:
    return solved(tmp_path_factory.mktemp("cuts"), 40, 120)


def test_the_first_hyperplanes_are_those_of_the_solve_and_a_call_continues_another(small: nc.SolveResult) -> None:
    found = nc.round_cut(small, 50)
    assert (found.best, found.mean) == (small.final["cut"], pytest.approx(small.final["mean_cut"], rel=1e-15))
    assert found.ratio == small.final["ratio"]
    whole, rest = nc.round_cut(small.folder, 300), nc.round_cut(small.name, 200, first=100, output=small.folder.parent)
    assert np.array_equal(whole.cuts[:50], found.cuts)
    assert np.array_equal(whole.cuts[100:], rest.cuts)
    assert whole.table["hyperplane"].tolist() == list(range(300)) and set(whole.table["seed"]) == {5}
    assert rest.table["hyperplane"].tolist() == list(range(100, 300))
    assert not np.array_equal(nc.round_cut(small, 50, seed=6).cuts, found.cuts)


def test_the_sides_have_the_best_cut(small: nc.SolveResult) -> None:
    found, graph = nc.round_cut(small, 200), small.config.problem_source.load().graph  # type: ignore[attr-defined]
    rows = np.repeat(np.arange(graph.vertices), np.diff(graph.indptr))
    assert float(graph.weights[found.sides[rows] != found.sides[graph.indices]].sum()) / 2 == found.best


def test_bad_input_is_one_line(small: nc.SolveResult, tmp_path: Path) -> None:
    for given, said in (
        ({"count": 0}, "count is 0; give a whole number of at least 1"),
        ({"first": -1}, "first is -1"),
        ({"workers": 2}, "2 workers side by side need Ray; add backend='ray'"),
        ({"backend": "spark"}, 'backend is "spark"; give local or ray'),
    ):
        with pytest.raises(UserError, match=said):
            nc.round_cut(small, **given)  # type: ignore[arg-type]
    other = nc.solve(
        "completion-ill-conditioned",
        {"problem.rows": 40, "problem.fraction": 0.5, "iterations": 3, "tracking.system_metrics": False},
        output=tmp_path,
        progress=False,
    )
    with pytest.raises(UserError, match="is not a solve of MAXCUT"):
        nc.round_cut(other)


class DyingPool(LocalPool):
    """Loses the worker of each of the first `deaths` jobs before its message."""

    def __init__(self, shared: Any, deaths: int) -> None:
        super().__init__(_round_part, pickle.loads(pickle.dumps(shared)))
        self.deaths = deaths

    def next_message(self, timeout_seconds: float) -> tuple[int, Any] | None:
        """Report a death in the place of a message."""
        if not self.deaths:
            return super().next_message(timeout_seconds)
        self.deaths -= 1
        return self._answers.pop(0)[0], WorkerDied("its worker died")


def test_parts_of_workers_that_die_are_repeated_and_change_nothing(small: nc.SolveResult) -> None:
    problem = small.config.problem_source.load()
    shared = (problem.graph, small.answer()["vectors"], 5)  # type: ignore[attr-defined]
    parts = [range(0, 64), range(64, 128), range(128, 150)]
    queue = _Parts(parts)
    dispatch(queue, DyingPool(shared, 2), 2)
    found = np.concatenate([queue.found[part.start].cuts for part in parts])
    assert np.array_equal(found, nc.round_cut(small, 150).cuts)
    with pytest.raises(nc.RunFailed, match="hyperplanes 0 to 63 failed: its worker died, 3 times"):
        dispatch(_Parts(parts[:1]), DyingPool(shared, 3), 1)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_two_actors_of_which_one_is_killed_give_the_cuts_of_this_process(tmp_path: Path) -> None:
    result, count = solved(tmp_path, 1500, 9000), 64 * 150 + 7
    killed: list[int] = []

    def kill() -> None:
        while not actor_processes("_Worker"):
            if ended.wait(0.02):
                return
        killed.append(kill_one("_Worker"))

    ended = threading.Event()
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        found = nc.round_cut(result, count, backend="ray", workers=2)
    finally:
        ended.set()
        killer.join()
    alone = nc.round_cut(result, count)
    assert len(killed) == 1
    assert np.array_equal(found.cuts, alone.cuts) and np.array_equal(found.sides, alone.sides)
    assert found.best == alone.best > found.mean
