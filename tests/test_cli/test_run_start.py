"""The first lines of a run, before anything heavy is imported, and what a dry run predicts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import narrowcast as nc
from command_line import assert_refused, narrowcast
from narrowcast.platform.tracking.units import format_bits, format_seconds

# MLflow's SQL store uses what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
TINY = ("fedavg-digits", "tracking.system_metrics=false", "targets={}")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("fedavg-digits", "rounds=3"), "fedavg-digits: fedavg on digits, model mlp, 3 rounds, backend local"),
        (
            ("fedavg-digits", "algorithm={codec: [svd]}", "name=a"),
            "a: fedavg on digits, model mlp, 100 rounds, backend local",
        ),
        (
            ("fedavg-digits", "model=softmax"),
            "fedavg-digits: fedavg on digits, model softmax, 100 rounds, backend local",
        ),
        (("max-cut-g1", "iterations=5"), "max-cut-g1: mixing on max_cut, 5 iterations"),
        (("no-such-file.yaml",), ""),
    ],
)
def test_what_the_run_is_needs_neither_torch_nor_the_data(words: tuple[str, ...], line: str) -> None:
    program = (
        "import sys\n"
        "from narrowcast.packaged import announcement\n"
        "print(announcement(sys.argv[1], sys.argv[2:]))\n"
        "assert not {'torch', 'ray', 'mlflow', 'pandas', 'scipy'} & {*sys.modules}\n"
    )
    said = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert said.stdout.rstrip("\n") == line


def test_a_run_says_what_it_is_and_then_what_its_data_are(tmp_path: Path) -> None:
    said = narrowcast("run", *TINY, "rounds=1", "--backend", "local", "--output", tmp_path)
    assert said.status == 0, said.err
    sizes = "1,293 training samples, 144 validation samples, 360 test samples"
    assert said.out.splitlines()[:3] == [
        "fedavg-digits: fedavg on digits, model mlp, 1 round, backend local",
        f"digits: classification, 200 clients, 10 classes, {sizes}",
        "fedavg-digits: 1 round",
    ]


def test_a_dry_run_predicts_the_costs_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = narrowcast("run", *TINY, "rounds=6", "--backend", "local", "--dry-run")
    assert said.status == 0, said.err
    assert list(tmp_path.iterdir()) == []
    shown = dict(line.split("  ", 1) for line in said.out.splitlines() if "  " in line)
    plan = {label.strip(): value.strip() for label, value in shown.items()}
    result = nc.run(
        "fedavg-digits", {"rounds": 6, "tracking.system_metrics": False}, backend="local", output="r", progress=False
    )
    assert plan["uplink"] == f"about {format_bits(result.uplink_bits)} in all"  # float32: each round has the same bits
    assert plan["downlink"] == f"about {format_bits(result.downlink_bits)} in all"
    predicted, simulated = plan["simulated time"].removeprefix("about "), result.simulated_seconds
    assert predicted in [format_seconds(simulated * factor / 1000) for factor in range(950, 1051)]
    assert plan["plan"] == "6 rounds of 20 clients"
    assert plan["model"] == f"mlp, {sum(values.size for values in result.arrays().values()):,} parameters of the server"
    assert plan["folder"] == "runs/fedavg-digits"


def test_a_dry_run_refuses_what_the_run_refuses(tmp_path: Path) -> None:
    dry = ("--dry-run", "--output", tmp_path / "runs")
    assert_refused(narrowcast("run", "fedavg-digits", "rounds=0", *dry), "rounds = 0: should be greater than or equal")
    assert_refused(narrowcast("run", "--resume", "a", *dry), "--dry-run is for new runs: name an experiment")
    assert not (tmp_path / "runs").exists()


def test_a_solve_is_planned_with_the_sizes_of_its_problem(tmp_path: Path) -> None:
    problem = "problem={kind: random_max_cut, vertices: 30, edges: 60}"
    said = narrowcast(
        "run", "max-cut-g1", problem, "iterations=4", "targets={}", "--dry-run", "--output", tmp_path / "r"
    )
    assert said.status == 0, said.err
    assert "30 vertices, 60 edges" in said.out
    assert "at most 4 iterations" in said.out
    assert not (tmp_path / "r").exists()
