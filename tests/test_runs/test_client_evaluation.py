"""Runs that evaluate their clients: tables, figures, reports, comparisons, targets, resume and verification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import narrowcast as nc
from command_line import narrowcast
from narrowcast.experiment import load_experiment
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.state import Run, start
from narrowcast.runs.learning import ineffective_settings
from narrowcast.runs.result import Result
from narrowcast.runs.verification import verify

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
CLIENTS, ROUNDS = 6, 4
SETTINGS = {
    **{"rounds": ROUNDS, "evaluate_every": 2, "clients_per_round": 3, "tracking.system_metrics": False},
    **{"data.clients": CLIENTS, "data.partition": "shards", "training.learning_rate": 0.5},
}
BOTH = {"evaluate_clients": ["test", "validation"]}


def run(output: Path, name: str, settings: Mapping[str, Any]) -> None:
    nc.run("fedavg-digits", {**SETTINGS, "name": name, **settings}, backend="local", output=output, progress=False)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory, drawn: None) -> Path:
    output = tmp_path_factory.mktemp("runs")
    run(output, "asked", {**BOTH, "targets": {"test.accuracy.worst_10_percent": [0.01]}})
    run(output, "plain", {})
    return output


@pytest.mark.slow
def test_all_clients_are_in_one_table_and_the_participants_in_theirs(output: Path) -> None:
    result = Result.load(output / "asked")
    table = result.client_metrics
    assert table[["round", "client"]].values.tolist() == [[r, c] for r in (2, 4) for c in range(CLIENTS)]
    metrics = ["test.accuracy", "test.loss", "validation.accuracy", "validation.loss"]
    assert list(table.columns) == ["round", "client", *metrics]
    joined = result.clients.merge(table, on=["round", "client"], how="left", suffixes=("", " there"))
    for name in metrics:
        np.testing.assert_array_equal(joined[name], joined[f"{name} there"])
        assert joined[name].isna().tolist() == [number % 2 == 1 for number in joined["round"]]
    last = table[table["round"] == ROUNDS]["test.accuracy"]
    assert result.final["test.accuracy.mean"] == pytest.approx(last.mean())
    assert result.final["test.accuracy.variance"] == pytest.approx(1e4 * last.var(ddof=0))
    assert result.final["test.accuracy.clients"] == CLIENTS
    assert result.best["test.accuracy.variance"].value == min(result.rounds["test.accuracy.variance"].dropna())


def test_nothing_else_of_the_run_changes(output: Path) -> None:
    asked, plain = (Result.load(output / name) for name in ("asked", "plain"))
    assert asked.model_sha256 == plain.model_sha256
    assert (asked.uplink_bits, asked.simulated_seconds) == (plain.uplink_bits, plain.simulated_seconds)
    assert {name: asked.final[name] for name in plain.final} == plain.final
    assert not (output / "plain" / "client_metrics.parquet").exists()
    with pytest.raises(UserError, match="plain did not evaluate its clients"):
        _ = plain.client_metrics


def test_few_samples_and_clients_without_any_are_said() -> None:
    experiment = load_experiment("fedavg-digits", ["evaluate_clients=test"])
    task = experiment.task(experiment.data_source.load())
    said = list(ineffective_settings(experiment, task, start(Run(experiment, experiment.algorithm, task))))
    assert said == [
        "4 of 200 clients have no test samples; metrics over clients leave them out",
        "evaluate_clients: half of the clients have 2 test samples or fewer; their metrics are coarse",
    ]
    task = experiment.task(replace(task.data, test=task.data.test.take(np.arange(50))))
    assert next(ineffective_settings(experiment, task, start(Run(experiment, experiment.algorithm, task)))) == (
        "150 of 200 clients have no test samples; metrics over clients leave them out"
    )


@pytest.mark.slow
def test_targets_summaries_and_reports_have_the_statistics(output: Path) -> None:
    result = Result.load(output / "asked")
    (target,) = result.targets
    assert (target.metric, target.value) == ("test.accuracy.worst_10_percent", 0.01)
    summary = dict(result.summary())
    assert summary["test accuracy of clients"].endswith(f"({CLIENTS} clients)")
    assert "test accuracy worst 10 percent ≥ 1 %" in summary
    assert (output / "asked" / "plots" / "client_metrics.png").is_file()
    assert list(result.figures())[-1] == "client_metrics"
    page = result.report(output / "page.html").read_text()
    assert "Metrics of the clients" in page
    with pytest.raises(UserError, match=r"targets.test.accuracy.mean is not a metric of this run"):
        run(output, "refused", {"targets": {"test.accuracy.mean": [0.5]}})
    with pytest.raises(UserError, match=r"targets.test.accuracy.mean = 80: the metric lies between 0 and 1"):
        run(output, "refused", {**BOTH, "targets": {"test.accuracy.variance": [80], "test.accuracy.mean": [80]}})


@pytest.mark.slow
def test_comparisons_have_a_table_and_a_figure(output: Path) -> None:
    comparison = nc.compare([output / "asked", output / "plain"])
    assert list(comparison.differences.index) == ["targets.test.accuracy.worst_10_percent"]
    figure = comparison.clients_figure()
    assert figure is not None
    (line,) = figure.axes[0].lines
    accuracies = Result.load(output / "asked").client_metrics.query(f"round == {ROUNDS}")["test.accuracy"]
    assert line.get_ydata()[[0, 50, 100]] == pytest.approx(np.percentile(100 * accuracies, [0, 50, 100]))
    said = narrowcast("compare", "asked", "plain", "--output", output)
    assert "worst 10 %" in said.out
    assert (output / "compare-clients.png").is_file()
    assert "Distribution over clients" in comparison.report(output / "comparison.html").read_text()
    assert nc.compare([output / "plain"]).clients_figure() is None
    with pytest.raises(UserError, match=r'by "test.acuracy"; measured: .*Did you mean "test.accuracy"'):
        comparison.clients_figure(metric="test.acuracy")
    axes = comparison.figure(["round"], "test.accuracy.variance").axes
    assert axes[0].get_ylabel() == "test accuracy variance"


@pytest.mark.slow
def test_a_resumed_run_has_the_same_tables_and_verifies(output: Path) -> None:
    run(output, "resumed", {**BOTH, "rounds": 2})
    nc.run(None, {"rounds": ROUNDS}, output=output, resume="resumed", progress=False)
    name = "client_metrics.parquet"
    assert pq.read_table(output / "resumed" / name) == pq.read_table(output / "asked" / name)
    checks = list(verify(output / "resumed"))
    assert {check.subject for check in checks} >= {name, "rounds repeated"}
    assert [check for check in checks if check.problem] == []
    journal = output / "resumed" / "journal.jsonl"
    table = pq.read_table(output / "resumed" / name)
    pq.write_table(table.set_column(2, "test.accuracy", table["test.loss"]), output / "resumed" / name)
    assert [check.subject for check in verify(output / "resumed") if check.problem] == [name]
    assert b'"client_metrics"' in journal.read_bytes()
