"""Benchmarks of solvers: instances as ordinary runs, what is repeated and what is not, killed workers, bad files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from mlflow import MlflowClient

import narrowcast as nc
from child_processes import actor_processes
from narrowcast.benchmarking.file import load_benchmark
from narrowcast.cli.main import cli
from narrowcast.runs.verification import verify
from narrowcast.solve_run import load_solve
from narrowcast_papers.completion.solves import cases

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
MIXED = """
problems:
  matrix: {kind: synthetic_completion, rows: 40, rank: 2, fraction: 0.5}
  grid: {kind: 'poisson:Poisson', points: 12}
solvers:
  scaled_asd: scaled_asd
  cg: 'unchecked:Unchecked'
seeds: [3]
solve: {iterations: 200, tolerance: 1e-8, spacing: 1.3}
settings:
  matrix.*: {targets: {test.relative_error: [1e-6]}}
  grid.*: {tolerance: 1e-6}
"""

UNCHECKED = """
from typing import Literal

from poisson import ConjugateGradients


class Unchecked(ConjugateGradients):
    kind: Literal["unchecked"] = "unchecked"

    def check(self, problem: object) -> None:
        pass
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("benchmark")
    shutil.copy(EXAMPLES / "poisson.py", folder)
    (folder / "unchecked.py").write_text(UNCHECKED)
    (folder / "mixed.yaml").write_text(MIXED)
    return folder / "mixed.yaml"


@pytest.fixture(scope="module")
def output(file: Path) -> Path:
    """A folder of runs with the benchmark `mixed`, of which one instance fails and one does not fit."""
    nc.benchmark(file, output=file.parent, progress=False)
    return file.parent


def again(file: Path, **options: Any) -> Any:
    return nc.benchmark(file, output=file.parent, progress=False, **options)


@pytest.mark.slow
def test_every_instance_ends_in_its_own_way(file: Path, output: Path) -> None:
    result = again(file)
    rows = {row["instance"]: row for row in result.rows}
    assert [row["state"] for row in result.rows] == ["finished", "failed", "skipped", "finished"]
    assert "is not a matrix completion problem" in rows["grid.scaled_asd.seed-3"]["reason"]
    assert "AttributeError" in rows["matrix.cg.seed-3"]["reason"]
    assert rows["matrix.scaled_asd.seed-3"]["reached/test relative error ≤ 1e-06"] is True
    assert rows["matrix.cg.seed-3"]["reached/test relative error ≤ 1e-06"] is False
    summary = dict(zip(result.summary().heads, result.summary().rows[0], strict=True))
    assert (summary["finished"], summary["skipped"], summary["test relative error ≤ 1e-06"]) == ("1", "1", "1 of 1")
    assert len((output / "mixed" / "instances.csv").read_text().splitlines()) == 5
    assert list(result.table["state"]) == [row["state"] for row in result.rows]


def test_an_instance_is_an_ordinary_solve(file: Path, output: Path, tmp_path: Path) -> None:
    run = again(file).solves[1]
    assert run.name == "grid.cg.seed-3"
    alone = nc.solve(run.config, output=tmp_path, progress=False)
    assert alone.file.answer_sha256 == run.file.answer_sha256
    assert run.file.stopped_by == "tolerance" and run.file.residual <= 1e-6
    assert all(each.problem == "" for each in verify(run.folder, 3))
    client = MlflowClient(f"sqlite:///{output / 'mixed' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("mixed")
    assert experiment is not None
    runs = {each.info.run_name: each for each in client.search_runs([experiment.experiment_id])}
    statuses = {name: each.info.status for name, each in runs.items()}
    assert statuses == {"grid.cg.seed-3": "FINISHED", "matrix.scaled_asd.seed-3": "FINISHED"}
    tags = runs["grid.cg.seed-3"].data.tags
    assert (tags["benchmark"], tags["benchmark.problem"], tags["benchmark.solver"]) == ("mixed", "grid", "cg")


@pytest.mark.usefixtures("output")
def test_only_powers_of_the_spacing_are_recorded(file: Path) -> None:
    table = again(file).solves[0].iterations
    assert table["test.relative_error"].notna().all()
    powers = {next(k for k in range(1, 400) if k >= 1.3**place) for place in range(23)}
    assert set(table["iteration"][:-1]) == {each for each in powers if each < table["iteration"].iloc[-1]}


@pytest.mark.parametrize(
    ("spacing", "recorded"),
    [
        (10, {10**power for power in range(8)}),
        (2, {2**power for power in range(24)}),
        (5, {5**power for power in range(11)}),
        (1.5, {-(-(3**power) // 2**power) for power in range(40)}),
    ],
)
def test_powers_that_are_whole_numbers_are_recorded_themselves(spacing: float, recorded: set[int]) -> None:
    solve = load_solve("completion-ill-conditioned", [f"spacing={spacing}"])
    near = sorted({number for power in recorded for number in (power - 1, power, power + 1) if number > 0})
    assert {number for number in near if solve.records(number)} == recorded


def test_an_instance_whose_folder_was_removed_is_waiting_and_a_damaged_one_has_failed(
    file: Path, output: Path, tmp_path: Path
) -> None:
    shutil.copytree(output / "mixed", tmp_path / "mixed")
    shutil.rmtree(tmp_path / "mixed" / "grid.cg.seed-3")
    (tmp_path / "mixed" / "matrix.scaled_asd.seed-3" / "result.json").write_text("{")
    nc.benchmark(file, output=tmp_path, progress=False, solvers=["scaled_asd"])
    table = (tmp_path / "mixed" / "instances.csv").read_text()
    states = {line.split(",")[0]: line.split(",")[4] for line in table.splitlines()[1:]}
    assert (states["grid.cg.seed-3"], states["matrix.scaled_asd.seed-3"]) == ("waiting", "failed")
    assert "result.json: unreadable" in table


def test_what_has_ended_is_not_repeated(file: Path, output: Path) -> None:
    journal = output / "mixed" / "instances.jsonl"
    before = journal.read_text()
    again(file)
    assert journal.read_text() == before
    again(file, retry=True)
    begun = Counter(json.loads(line)["instance"] for line in journal.read_text()[len(before) :].splitlines())
    assert begun == {"matrix.cg.seed-3": 2, "grid.scaled_asd.seed-3": 2}  # begun and ended


def test_a_benchmark_that_was_killed_before_it_noted_an_end_does_not_repeat_it(file: Path, output: Path) -> None:
    journal = output / "mixed" / "instances.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    result = output / "mixed" / "grid.cg.seed-3" / "result.json"
    before = result.stat().st_mtime_ns
    kept = [each for each in lines if not ('"grid.cg.seed-3"' in each and '"finished"' in each)]
    journal.write_text("".join(kept) + lines[-1][:20])  # and a line that was cut
    assert [row["state"] for row in again(file).rows].count("finished") == 2
    assert result.stat().st_mtime_ns == before


@pytest.mark.slow
def test_commands_take_the_folder_of_a_benchmark(file: Path, output: Path) -> None:
    words = ["compare", str(output / "mixed"), "--plot", str(output / "mixed.png"), "--csv", str(output / "mixed.csv")]
    said = CliRunner().invoke(cli, words)
    assert said.exit_code == 0, said.output
    assert len((output / "mixed.csv").read_text().splitlines()) == 3
    synced = CliRunner().invoke(cli, ["sync", str(output / "mixed")])
    assert synced.exit_code == 0, synced.output
    assert "grid.cg.seed-3: 0 rounds sent, MLflow is up to date" in synced.output
    said = CliRunner().invoke(cli, ["benchmark", str(file), "--problems", "grid", "--output", str(output)])
    assert said.exit_code == 0, said.output
    assert "2 of 2 instances have ended already" in said.output
    assert len((output / "mixed" / "instances.csv").read_text().splitlines()) == 5


def test_other_settings_need_another_name(file: Path, output: Path) -> None:
    with pytest.raises(nc.UserError, match=r"matrix\.scaled_asd\.seed-3 was begun with other settings"):
        again(file, overrides={"solve.iterations": 300})
    with pytest.raises(nc.UserError, match="is a run's folder"):
        nc.benchmark(file, {"name": "grid.cg.seed-3"}, output=output / "mixed", progress=False)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"solve.seed": 1}, "solve.seed: all solves of a benchmark have this from seeds"),
        ({"settings": {"grid.*": {"problem.points": 3}}}, "problem.points: all solves of a benchmark have this from"),
        ({"settings": {"gird.*": {"tolerance": 0.1}}}, r'settings."gird.\*" matches no PROBLEM.SOLVER, such as matrix'),
        ({"solvers.scaled_asd.rnk": 3}, "scaled_asd on matrix: solver.rnk is unknown"),
        ({"solve.itertions": 3}, "itertions is unknown"),
        ({"seeds": [1, 1]}, "give different seeds"),
        ({"workers": 2}, "solves side by side need Ray; add backend=ray, or --backend ray"),
        ({"problems": {"a.b": {"kind": "synthetic_completion"}}}, "should begin with a letter or digit"),
        ({"solvers": {}}, "solvers"),
    ],
)
def test_bad_files_are_refused_in_one_line(file: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(nc.UserError, match=message) as error:
        nc.benchmark(file, overrides, output=file.parent, progress=False)
    assert "\n" not in str(error.value)


def test_files_of_another_kind_and_unknown_names_are_refused(file: Path) -> None:
    with pytest.raises(nc.UserError, match=r'mixed has no solver "scaled"; it has scaled_asd, cg\. Did you mean'):
        nc.benchmark(file, solvers=["scaled"], output=file.parent)
    with pytest.raises(
        nc.UserError, match=r"is a single run, with no problems and solvers; run it with: narrowcast run"
    ):
        nc.benchmark(EXAMPLES / "poisson.yaml", output=file.parent)
    with pytest.raises(nc.UserError, match=r"is a benchmark of solvers; run it with: narrowcast benchmark"):
        nc.run(file, output=file.parent)
    with pytest.raises(nc.UserError, match=r"completion-65 is a benchmark of solvers"):
        nc.tune("completion-65", output=file.parent)


def test_the_packaged_benchmark_has_the_cases_of_the_report_and_two_more() -> None:
    benchmark = load_benchmark("completion-65")
    assert len(benchmark.instances) == 65 * 11
    drawn = {each.problem: each.solve.problem_source for each in benchmark.instances}
    assert {case.name: case.source(1) for case in cases()} == {
        name: source for name, source in drawn.items() if name not in ("china", "movielens-100k")
    }
    assert len(benchmark.only(["n1000-*"], ["asd", "r*"]).instances) == 27 * 2


SMALL = """
problems:
  easy: {kind: synthetic_completion, rows: 300, rank: 2, fraction: 0.3}
  hard: {kind: synthetic_completion, rows: 500, rank: 4, fraction: 0.3, condition: 1000}
solvers: {scaled_asd: scaled_asd, asd: asd, niht: niht}
solve: {iterations: 3000, spacing: 1.2, checkpoint_every: 100}
cpus_per_worker: 0.5
"""


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_killed_worker_and_a_killed_benchmark_lose_nothing(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    words = [sys.executable, "-m", "narrowcast", "benchmark", str(tmp_path / "small.yaml"), "--workers", "2"]
    words += ["--output", str(tmp_path)]
    journal = tmp_path / "small" / "instances.jsonl"

    def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 240
        while not condition():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def records(instance: str) -> int:
        own = tmp_path / "small" / instance / "journal.jsonl"
        return own.read_text().count("\n") if own.exists() else 0

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, env=environment, start_new_session=True)
    try:
        wait_for(lambda: all(records(f"easy.{solver}.seed-0") > 5 for solver in ("scaled_asd", "asd")), process)
        workers = actor_processes("_Worker", process.pid)
        assert len(workers) == 2
        workers[0].kill()
        wait_for(lambda: journal.read_text().count('"finished"') >= 2, process)
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        _, left = psutil.wait_procs(children, timeout=10)
        for child in left:
            child.kill()
    finished = journal.read_text().count('"finished"')
    done = subprocess.run(words, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ends = Counter(
        entry["instance"] for entry in map(json.loads, journal.read_text().splitlines()) if entry["state"] == "finished"
    )
    assert finished < 6 and ends == dict.fromkeys(ends, 1) and len(ends) == 6
    alone = nc.benchmark(tmp_path / "small.yaml", output=tmp_path / "alone", progress=False)
    digests = {row["instance"]: row["answer_sha256"] for row in alone.rows}
    for name, digest in digests.items():
        found = nc.load_run(name, output=tmp_path / "small")
        assert found.file.answer_sha256 == digest
        assert found.file.iterations == 3000 or found.file.stopped_by in ("converged", "stalled")
    client = MlflowClient(f"sqlite:///{tmp_path / 'small' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    statuses = Counter(each.info.status for each in client.search_runs([experiment.experiment_id]))
    assert statuses["FINISHED"] == 6
