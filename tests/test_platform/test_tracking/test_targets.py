"""The cost of reaching targets, from the journal to result.json, MLflow and the tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient
from rich.console import Console

from narrowcast.api import compare
from narrowcast.cli.shared import pairs_table
from narrowcast.experiment import load_experiment
from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking.metrics import RunTargetCost, check_targets, is_better, lower_is_better, target_costs
from narrowcast.runs import session
from narrowcast.runs.comparison_tables import targets_table
from narrowcast.runs.prepared import prepare
from narrowcast.runs.result import Result

# MLflow's SQL store uses what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

ROWS = [
    {"round": 1, "simulated_seconds": 10.0, "total_uplink_bits": 100},
    {"round": 2, "simulated_seconds": 20.0, "total_uplink_bits": 200, "test.accuracy": 0.5},
    {"round": 3, "simulated_seconds": 30.0, "total_uplink_bits": 300},
    {"round": 4, "simulated_seconds": 40.0, "total_uplink_bits": 400, "test.accuracy": 0.8},
    {"round": 6, "simulated_seconds": 60.0, "total_uplink_bits": 600, "test.accuracy": 0.7},
]


def test_the_first_evaluation_that_reaches_a_target_counts() -> None:
    got = target_costs(RunTargetCost, {"test.accuracy": (0.4, 0.5, 0.51, 0.8, 0.81)}, ROWS)
    assert [each.rounds_to for each in got] == [2, 2, 4, 4, None]
    assert [each.simulated_seconds_to for each in got] == [20.0, 20.0, 40.0, 40.0, None]
    assert [each.uplink_bits_to for each in got] == [200, 200, 400, 400, None]
    assert target_costs(RunTargetCost, {}, ROWS) == []
    assert got[2].metrics() | got[3].metrics() | got[4].metrics() == {
        "simulated_seconds_to.test.accuracy.0.51": 40.0,
        "uplink_bits_to.test.accuracy.0.51": 400,
        "rounds_to.test.accuracy.0.51": 4,
        "simulated_seconds_to.test.accuracy.0.8": 40.0,
        "uplink_bits_to.test.accuracy.0.8": 400,
        "rounds_to.test.accuracy.0.8": 4,
    }


def test_a_target_of_a_loss_is_reached_from_above() -> None:
    rows = [
        {"round": number, "simulated_seconds": 1.0, "total_uplink_bits": 8, "test.loss": loss}
        for number, loss in ((1, 2.298), (2, 0.7), (3, 0.5), (4, 0.6))
    ]
    assert [each.rounds_to for each in target_costs(RunTargetCost, {"test.loss": (2.3, 0.5, 0.4)}, rows)] == [
        1,
        3,
        None,
    ]


@pytest.mark.parametrize(
    ("metric", "lower"),
    [
        ("test.loss", True),
        ("validation.cross_entropy", True),
        ("test.error_rate", True),
        ("test.rmse@10", True),
        ("loss", True),
        ("attack.success", True),
        ("test.accuracy", False),
        ("test.hr@10", False),
        ("test.glossiness", False),
    ],
)
def test_the_direction_of_a_metric_follows_from_its_name(metric: str, lower: bool) -> None:
    assert lower_is_better(metric) is lower
    assert is_better(metric, 0.1, 0.2) is lower
    assert is_better(metric, 0.2, float("nan"))
    assert not is_better(metric, float("nan"), 0.2)


def test_a_declared_direction_goes_before_the_name() -> None:
    assert lower_is_better("test.misses", ["misses"])
    assert not lower_is_better("test.error_free_share", [])
    rows = [{"round": 1, "test.misses": 9.0}, {"round": 2, "test.misses": 4.0}]
    assert [each.rounds_to for each in target_costs(RunTargetCost, {"test.misses": (5.0,)}, rows, ["misses"])] == [2]
    assert [each.rounds_to for each in target_costs(RunTargetCost, {"test.misses": (5.0,)}, rows)] == [1]


def test_an_unknown_metric_is_refused_with_the_known_ones() -> None:
    check_targets({"test.accuracy": (0.5,)}, ["test.accuracy", "test.loss"])
    with pytest.raises(UserError) as caught:
        check_targets({"test.acuracy": (0.5,)}, ["test.loss", "test.accuracy"])
    assert str(caught.value) == (
        "targets.test.acuracy is not a metric of this run; it measures test.accuracy, test.loss. "
        'Did you mean "test.accuracy"?'
    )


def test_a_target_above_1_is_refused_for_the_shares_that_a_model_declares_alone() -> None:
    measured = ["test.accuracy", "test.recall@3"]
    check_targets({"test.accuracy": (80.0,), "test.recall@3": (5.0,)}, measured)
    check_targets({"test.recall@3": (5.0,)}, measured, shares=["accuracy"])
    with pytest.raises(UserError, match=r"targets.test.accuracy = 80: the metric lies between 0 and 1"):
        check_targets({"test.accuracy": (0.5, 80.0)}, measured, shares=["accuracy"])
    assert getattr(load_experiment("fedavg-digits").model, "shares", ()) == {"accuracy"}
    assert getattr(load_experiment("scolr-ml100k").model, "shares", ()) == {"hr@10", "ndcg@10"}


@pytest.mark.parametrize("written", ["targets.test.accuracy=[0.2,0.9]", "targets={test.accuracy: [0.2, 0.9]}"])
def test_targets_are_written_as_a_path_or_as_a_name(written: str) -> None:
    experiment = load_experiment("fedavg-digits", [written])
    assert experiment.targets == {"test.accuracy": (0.2, 0.9)}
    assert experiment.digest() == load_experiment("fedavg-digits").digest()
    assert load_experiment("fedavg-digits", ["targets.test.accuracy=0.2"]).targets == {"test.accuracy": (0.2,)}


@pytest.mark.parametrize("written", ["targets.test.accuracy=[]", "targets.test.accuracy=high", "targets=0.5"])
def test_what_is_no_target_is_refused(written: str) -> None:
    with pytest.raises(UserError, match=r"targets"):
        load_experiment("fedavg-digits", [written])


def test_a_run_tells_what_its_targets_took(tmp_path: Path) -> None:
    settings = ["rounds=12", "evaluate_every=3", "targets.test.accuracy=[0.1,0.99]", "tracking.system_metrics=false"]
    result = session.run(prepare(load_experiment("fedavg-digits", settings), tmp_path), lambda _: None)
    first, second = json.loads((tmp_path / "fedavg-digits" / "result.json").read_text())["targets"]
    assert first["rounds_to"] in (3, 6, 9, 12)
    history = Result.load(tmp_path / "fedavg-digits").history.to_pylist()
    row = history[first["rounds_to"] - 1]
    assert (first["uplink_bits_to"], first["total_bits_to"], first["simulated_seconds_to"]) == (
        row["total_uplink_bits"],
        row["total_uplink_bits"] + row["total_downlink_bits"],
        row["simulated_seconds"],
    )
    assert all(each["test.accuracy"] is None or each["test.accuracy"] < 0.1 for each in history[: row["round"] - 1])
    assert second == {
        "metric": "test.accuracy",
        "value": 0.99,
        "simulated_seconds_to": None,
        "uplink_bits_to": None,
        "total_bits_to": None,
        "rounds_to": None,
    }
    logged = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_run(result["mlflow_run_id"]).data.metrics
    assert logged["rounds_to.test.accuracy.0.1"] == first["rounds_to"]
    assert "rounds_to.test.accuracy.0.99" not in logged

    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        table = targets_table(compare([tmp_path / "fedavg-digits"]).groups)
        assert table is not None
        console.print(*table.fitting(console.width))
        console.print(pairs_table(Result.load(tmp_path / "fedavg-digits").summary()))
    words = capture.get().split()
    place = words.index("≥")
    assert words[place - 2 : place + 4] == ["test", "accuracy", "≥", "10", "%", str(first["rounds_to"])]
    assert "not reached" in capture.get()


def test_a_metric_whose_name_mlflow_refuses_is_a_target_too(tmp_path: Path) -> None:
    settings = ["backend=local", "rounds=1", "targets={test.hr@10: 0}", "tracking.system_metrics=false"]
    result = session.run(prepare(load_experiment("scolr-ml100k", settings), tmp_path), lambda _: None)
    run = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_run(result["mlflow_run_id"]).data
    assert run.metrics["rounds_to.test.hr_at_10.0"] == 1
    assert run.params["targets.test.hr_at_10"] == "[0.0]"


def test_a_run_is_refused_whose_target_it_does_not_measure(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"targets.test.hr@10 is not a metric of this run; it measures test.accuracy, "):
        prepare(load_experiment("fedavg-digits", ["targets={test.hr@10: 0.5}"]), tmp_path)
    assert list(tmp_path.iterdir()) == []
