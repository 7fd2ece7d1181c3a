"""An algorithm's own metrics, of clients and of the server's step, from the pass to the journal and MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow import MlflowClient

import narrowcast as nc
from command_line import narrowcast
from narrowcast.platform.rounds.ledger import Weighted, joined_metrics

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
MODULE = """
from dataclasses import replace
from typing import Literal

import numpy as np

from narrowcast.extend import Averaging, Weighted


class Measuring(Averaging):
    kind: Literal["measuring"] = "measuring"
    name: str = "number"
    of_step: str = "weight"

    def contribution(self, broadcast, chunk, task, arrived):
        examples = task.data.examples[chunk.clients].astype(np.float64)
        metrics = {self.name: Weighted(chunk.clients.astype(np.float64), examples)}
        return replace(super().contribution(broadcast, chunk, task, arrived), metrics=metrics)

    def step_metrics(self, before, after, total, task):
        return {self.of_step: float(total["weight"])}
"""
SETTINGS = {
    **{"data.clients": 20, "rounds": 4, "clients_per_round": 6, "chunk_size": 2, "training.epochs": 1},
    **{"tracking.system_metrics": False, "name": "digits", "algorithm": "measured_rounds:Measuring"},
}
LATE = {"over_selection": 1.5}


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "measured_rounds.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


def run(backend: str = "local", **options: Any) -> Any:
    settings = {**SETTINGS, **options.pop("settings", {})}
    return nc.run("fedavg-digits", settings, output="runs", backend=backend, progress=False, **options)


def of_ledger(result: Any) -> tuple[list[float], list[float]]:
    """The mean number of the clients that delivered, weighted by examples, and their examples, by round."""
    delivered = result.clients[result.clients["delivered"]]
    examples, rounds = delivered["examples"], delivered["round"]  # of one local epoch
    weight = examples.groupby(rounds).sum()
    return list((delivered["client"] * examples).groupby(rounds).sum() / weight), list(weight)


def columns(result: Any) -> list[list[float]]:
    return [list(result.rounds[name]) for name in ("number", "weight")]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, LATE, {"secure.kind": "plain"}], ids=str)
def test_metrics_are_columns_of_the_rounds_and_of_the_store(settings: dict[str, Any]) -> None:
    result = run(settings=settings)
    assert len(result.rounds) == 4
    for got, wanted in zip(columns(result), of_ledger(result), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12)
    assert bool(settings == LATE) == bool((~result.clients["delivered"]).any())
    client = MlflowClient(f"sqlite:///{Path('runs').absolute()}/mlflow.db")
    history = client.get_metric_history(result.file.mlflow_run_id, "number")
    assert [entry.value for entry in sorted(history, key=lambda entry: entry.step)] == columns(result)[0]


@pytest.mark.slow
def test_metrics_of_a_resumed_run_are_those_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    straight = columns(run(settings={"name": "straight"}))
    run(settings={"rounds": 2})
    resumed = run(resume="digits")
    assert columns(resumed) == straight
    said = narrowcast("verify", "digits", "--output", tmp_path / "runs", "--trust")
    assert said.status == 0, said.out
    assert "repeated from" in said.out


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.thorough  # test_ray_backend.py compares all metrics of a run
@pytest.mark.usefixtures("shared_ray")
def test_metrics_on_two_actors_are_those_of_this_process() -> None:
    here, there = run(settings={"name": "here"}), run("ray", settings={"backend.actors": 2, "backend.address": "auto"})
    assert columns(here) == columns(there)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm.name": "loss"}, "returned the metric 'loss', which is a column of every round; rename it"),
        ({"algorithm.of_step": "wall_seconds"}, "step_metrics returned the metric 'wall_seconds', which is a column"),
        ({"algorithm.of_step": "number"}, "returned 'number', a metric of contributions too; name one of them"),
        ({"algorithm.name": "test.accuracy"}, "its name should have only letters, digits"),
    ],
)
def test_names_that_are_taken_are_refused_before_round_1(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(nc.UserError) as raised:
        run(settings=settings)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not Path("runs").exists()


def test_the_mean_leaves_out_clients_without_weight() -> None:
    parts = [
        {"a": Weighted(np.array([1.0, np.nan]), np.array([3.0, 0.0]))},
        {"a": Weighted(np.array([5.0]), np.array([1.0])), "b": Weighted(np.array([7.0]), np.array([0.0]))},
    ]
    joined = joined_metrics(parts)
    assert joined["a"].mean == 2
    assert np.isnan(joined["b"].mean)
