"""Runs of personal methods beside their controls: those in the folder are added, the others named by their command."""

from __future__ import annotations

import shlex
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import narrowcast as nc
from command_line import narrowcast
from narrowcast.runs.comparison_tables import judged_by
from narrowcast.runs.result import Result

# MLflow's SQL store uses what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
SETTINGS: dict[str, Any] = {
    **{"data": {"kind": "digits", "clients": 12, "partition": {"kind": "shards", "classes_per_client": 1}}},
    **{"model": "softmax", "rounds": 3, "evaluate_clients": ["test"], "clients_per_round": 12, "backend": "local"},
    **{"training": {"epochs": 2, "batch_size": 10, "learning_rate": 0.1}, "tracking": {"system_metrics": False}},
}
MIXED = {"kind": "apfl", "alpha": 0.1}  # mostly the global model, which has to tell ten classes apart


def run(output: Path, name: str, algorithm: Any, **more: Any) -> Any:
    return nc.run({**SETTINGS, "name": name, "algorithm": algorithm, **more}, output=output, progress=False)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs")
    run(output, "mixed", MIXED)
    run(output, "shared", "fedavg")
    return output


def report_of(output: Path, name: str) -> str:
    assert narrowcast("report", name, "--output", output, "--file", output / "page.html").status == 0
    return unescape((output / "page.html").read_text())


@pytest.mark.slow
def test_the_commands_of_missing_controls_make_them_and_they_are_then_added(output: Path) -> None:
    before = nc.compare(["mixed", "shared"], output=output)
    assert f"<h2>Controls</h2><p>{'</p><p>'.join(before.remarks)}</p>" in report_of(output, "mixed")
    assert (len(before.runs), before.added) == (2, ())
    commands = [line.partition(": ")[2] for line in before.remarks]
    assert [line.partition(": ")[0] for line in before.remarks] == [
        "mixed stands without training alone (local)",
        "mixed stands without fine-tuned FedAvg (fine_tune)",
    ]
    said = [narrowcast(*shlex.split(command)[1:]) for command in commands]
    assert [each.status for each in said] == [0, 0]
    after = nc.compare(["mixed", "shared"], output=output)
    assert after.added == ("mixed-fine_tune", "mixed-local")
    assert [run.name for run in after.runs] == ["mixed", "shared", *after.added]
    assert after.remarks[0] == "Controls in the same folder, added: mixed-fine_tune, mixed-local."
    assert not any("stands without" in line for line in after.remarks)
    assert {path.split(".")[0] for path in after.differences.index} == {"algorithm"}
    of_clients = after.text_tables()["Metrics over clients"]
    assert {row[0] for row in of_clients.rows} == {"mixed", "shared", *after.added}
    figure = after.clients_figure()
    assert figure is not None
    assert len(figure.axes[0].lines) == 4
    assert nc.compare(after.runs).added == ()
    reported = report_of(output, "mixed")
    assert "stands without" not in reported
    for name in ("mixed", *after.added):
        mean = Result.load(output / name).client_metrics.query("round == 3")["test.accuracy"].mean()
        assert f"{name}</td><td class='word'>test accuracy</td><td class='number'>{100 * mean:.2f} %</td>" in reported


@pytest.mark.slow
def test_a_method_below_a_control_is_said_to_be(output: Path) -> None:
    alone = run(output, "alone", "local")
    mixed = Result.load(output / "mixed")
    means = [result.client_metrics.query("round == 3")["test.accuracy"].mean() for result in (mixed, alone)]
    assert means[0] < means[1]
    comparison = nc.compare([mixed, alone])
    line = (
        f"mixed is worse than training alone (alone): test accuracy of clients {100 * means[0]:.2f} %, "
        f"not {100 * means[1]:.2f} %"
    )
    assert line in comparison.remarks
    assert line in narrowcast("compare", "mixed", "alone", "--output", output).out.splitlines()
    assert line in comparison.report(output / "page.html").read_text()


@pytest.mark.slow
def test_other_data_seeds_and_settings_are_no_controls(tmp_path: Path) -> None:
    mixed = run(tmp_path, "mixed", MIXED, seed=3)
    run(tmp_path, "other-seed", "local", seed=4)
    run(tmp_path, "longer", "local", seed=3, rounds=4)
    run(tmp_path, "iid", "local", seed=3, data={**SETTINGS["data"], "partition": "iid"})
    run(tmp_path, "unmeasured", "fine_tune", seed=3, evaluate_clients=[])
    comparison = nc.compare(mixed)
    assert comparison.added == ()
    assert len(comparison.remarks) == 2
    run(tmp_path, "alone", "local", seed=3, evaluate_every=1)
    assert nc.compare(mixed).added == ("alone",)


@pytest.mark.slow
def test_the_controls_of_several_seeds_are_one_command(tmp_path: Path) -> None:
    run(tmp_path, "mixed", MIXED, **{"replicas": {"seed": [0, 1]}})
    comparison = nc.compare("mixed-*", output=tmp_path)
    alone = next(line for line in comparison.remarks if "(local)" in line).partition(": ")[2]
    assert narrowcast(*shlex.split(alone)[1:]).status == 0
    comparison = nc.compare("mixed-seed-*", output=tmp_path)
    assert [group.label for group in comparison.groups] == ["mixed (2 seeds)", "mixed-local (2 seeds)"]
    better = next(line for line in comparison.remarks if "worse" in line)
    means = [np.mean([run.final["test.accuracy.mean"] for run in group.runs]) for group in comparison.groups]
    assert better.endswith(f"of clients {100 * means[0]:.2f} %, not {100 * means[1]:.2f} %")


def test_personal_runs_are_judged_by_their_clients(output: Path) -> None:
    mixed, shared = (Result.load(output / name) for name in ("mixed", "shared"))
    comparison = nc.compare([mixed, shared])
    assert set(judged_by(comparison.groups)) == {"test.accuracy.mean"}
    assert comparison.figure(["round"]).axes[0].get_ylabel() == "test accuracy mean (%)"
    heads = comparison.results_table().heads
    assert heads.index("test\naccuracy of clients") < heads.index("test\naccuracy")
    labels = [label for label, _ in mixed.summary()]
    assert labels[:2] == ["test accuracy of clients' own models", "test accuracy"]
    assert [label for label, _ in shared.summary()][:2] == ["test accuracy", "test accuracy of clients"]
    assert judged_by(nc.compare(shared).groups) == ["test.accuracy"]


def test_a_run_shows_the_metric_of_its_clients_and_its_controls(output: Path, tmp_path: Path) -> None:
    run(tmp_path, "alone", "local")
    said = narrowcast("run", output / "mixed" / "config.yaml", "name=again", "--output", tmp_path)
    final = Result.load(tmp_path / "again").final
    assert f"test accuracy mean {100 * final['test.accuracy.mean']:.2f} %" in said.out
    assert "again is worse than training alone" in said.out
    assert "Controls in the same folder, added: " in said.out
