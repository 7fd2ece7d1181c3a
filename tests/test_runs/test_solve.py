"""Solves from their file to their folder: results, exact resume, MLflow, comparison, verification and bad input."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow import MlflowClient

import narrowcast as nc
from command import Command
from narrowcast.platform.solving import SolveState, StepResult, begin, iterations
from narrowcast.runs import session
from narrowcast.runs.prepared import PreparedSolve
from narrowcast.runs.verification import verify
from narrowcast.solve_run import load_solve

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
POISSON = Path(__file__).parents[2] / "docs" / "examples" / "poisson.yaml"
COMPLETION = "completion-ill-conditioned"
SMALL = {"problem.rows": 60, "problem.fraction": 0.5, "iterations": 40, "tolerance": None}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory, drawn: None) -> Path:
    """A folder of runs with one finished solve, `poisson`."""
    folder = tmp_path_factory.mktemp("solves")
    nc.solve(POISSON, output=folder, progress=False)
    return folder


@pytest.fixture(scope="module")
def solved(output: Path) -> nc.SolveResult:
    """The finished solve."""
    return nc.load_run("poisson", output=output)


@pytest.mark.slow
def test_a_solve_ends_at_its_tolerance_and_leaves_a_run(solved: nc.SolveResult) -> None:
    file = solved.file
    assert file.stopped_by == "tolerance"
    assert file.residual <= 1e-10 < solved.iterations["residual"].iloc[-2]
    assert solved.final["relative_error"] < 1e-8
    assert len(solved.iterations) == file.iterations < 500
    assert file.wall_seconds >= file.solver_seconds
    first, second = solved.targets
    errors = solved.iterations.dropna(subset="relative_error").set_index("iteration")["relative_error"]
    assert first.iterations_to == errors.index[errors <= 1e-2][0]
    assert second.iterations_to == errors.index[errors <= 1e-6][0]
    for name in ("config.yaml", "iterations.parquet", "answer.safetensors", "plots/error_time.png"):
        assert (solved.folder / name).is_file(), name
    problem = load_solve(str(POISSON)).problem_source.load()
    assert np.linalg.norm(solved.answer()["values"] - problem.solution) < 1e-8 * np.linalg.norm(problem.solution)


def test_mlflow_has_every_recorded_iteration(solved: nc.SolveResult, output: Path) -> None:
    client = MlflowClient(f"sqlite:///{output / 'mlflow.db'}")
    run = client.get_run(str(solved.file.mlflow_run_id))
    assert run.info.status == "FINISHED"
    assert run.data.tags["solver"] == "conjugate_gradients"
    assert run.data.tags["answer_sha256"] == solved.file.answer_sha256
    assert run.data.metrics["iterations_to.relative_error.1e-06"] == solved.targets[1].iterations_to
    history = client.get_metric_history(run.info.run_id, "residual")
    assert {each.step: each.value for each in history} == dict(
        zip(solved.iterations["iteration"], solved.iterations["residual"], strict=True)
    )


def test_the_bare_loop_gives_the_same_answer(solved: nc.SolveResult) -> None:
    *_, last = nc.iterations(POISSON)
    assert last.state is not None
    assert last.step == solved.file.iterations
    np.testing.assert_array_equal(last.state.arrays["values"], solved.answer()["values"])


@pytest.mark.slow
@pytest.mark.parametrize("record_every", [1, 7])
def test_an_interrupted_solve_resumes_to_the_same_answer(
    tmp_path: Path, solved: nc.SolveResult, record_every: int
) -> None:
    def stop(row: Any) -> None:
        if row["iteration"] >= 40:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        nc.solve(POISSON, {"record_every": record_every, "name": "cut"}, output=tmp_path, progress=stop)
    assert not (tmp_path / "cut" / "result.json").exists()
    again = nc.solve(resume="cut", output=tmp_path, progress=False)
    assert again.file.answer_sha256 == solved.file.answer_sha256
    assert again.file.iterations == solved.file.iterations
    assert all(each.problem == "" for each in verify(tmp_path / "cut", 5))


@pytest.mark.slow
def test_a_lower_tolerance_goes_on_from_a_finished_solve(tmp_path: Path, solved: nc.SolveResult) -> None:
    early = nc.solve(POISSON, {"tolerance": 1e-3}, output=tmp_path, progress=False)
    assert early.file.iterations < solved.file.iterations
    later = nc.solve(POISSON, {"tolerance": 1e-10}, output=tmp_path, resume="poisson", progress=False)
    assert later.file.answer_sha256 == solved.file.answer_sha256
    with pytest.raises(nc.UserError, match=r"problem\.points was 50, now 60; resume with its own"):
        nc.solve(POISSON, {"problem.points": 60}, output=tmp_path, resume="poisson", progress=False)


@pytest.mark.slow
def test_a_killed_solve_resumes_to_the_same_answer(tmp_path: Path) -> None:
    words = (COMPLETION, "problem.rows=300", "problem.fraction=0.3", "iterations=400", "tolerance=null")
    whole = nc.solve(COMPLETION, dict(_override(each) for each in words[1:]), output=tmp_path / "whole", progress=False)
    command = Command("run", *words, "checkpoint_every=20", "--output", tmp_path, log=tmp_path / "killed")
    try:
        command.wait_for_round(tmp_path / COMPLETION, 25)
        command.send(signal.SIGKILL)
        assert command.wait() == -signal.SIGKILL
    finally:
        command.clean_up()
    again = Command("run", "--resume", COMPLETION, "--output", tmp_path, log=tmp_path / "again")
    try:
        assert again.wait() == 0, again.err
    finally:
        again.clean_up()
    result = json.loads((tmp_path / COMPLETION / "result.json").read_text())
    assert result["answer_sha256"] == whole.file.answer_sha256


def _override(word: str) -> tuple[str, Any]:
    path, _, text = word.partition("=")
    return path, json.loads(text)


@pytest.mark.slow
def test_solves_are_compared_by_metrics_iterations_and_time(tmp_path: Path) -> None:
    kinds = ["scaled_asd", "power_factorisation"]
    results = nc.solve(COMPLETION, {**SMALL, "replicas.solver.kind": kinds}, output=tmp_path, progress=False)
    comparison = nc.compare(results)
    assert list(comparison.table["solver"]) == kinds
    assert {"test.relative_error", "iterations", "solver_seconds", "stopped_by"} <= set(comparison.table.columns)
    assert comparison.plot(tmp_path / "errors.png", axes=["iteration"], metric="test.relative_error").axes
    assert "power" in comparison.latex()
    page = comparison.report(tmp_path / "solves.html").read_text()
    assert "Settings that differ" in page and "solver.kind" in page
    with pytest.raises(nc.UserError, match="known for solves: iteration, time"):
        comparison.plot(axes=["uplink"])
    with pytest.raises(nc.UserError, match='no run has the metric "gap"'):
        comparison.plot(metric="gap")


@pytest.mark.slow
def test_a_solve_and_an_experiment_are_not_compared(tmp_path: Path, solved: nc.SolveResult) -> None:
    federated = nc.run("fedavg-digits", {"rounds": 2}, output=tmp_path, progress=False)
    with pytest.raises(nc.UserError, match="poisson is a solve and fedavg-digits is not"):
        nc.compare([solved, federated])


OWN = """
from typing import ClassVar
from pydantic import BaseModel, ConfigDict
from narrowcast.extend import ProblemSource, Solver
class X({bases}):
    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: str = "x"
    {body}
"""


@pytest.mark.parametrize(
    ("section", "bases", "body", "message"),
    [
        ("problem", "BaseModel", "", "is not a problem: it has to extend ProblemSource"),
        ("problem", "ProblemSource, BaseModel", "", "is not a problem: it lacks load, lower_is_better"),
        ("solver", "BaseModel", "", "is not a solver: it has to extend Solver"),
        ("solver", "Solver, BaseModel", "", "is not a solver: it lacks answer, check, init, step"),
        (
            "problem",
            "ProblemSource, BaseModel",
            "lower_is_better: ClassVar = ()\n    def load(self): return dict(name='mine')",
            "X.load returned a dict, which is not a problem: it has to extend Problem of narrowcast.extend",
        ),
    ],
)
def test_a_class_of_ones_own_is_told_its_base(
    section: str, bases: str, body: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"own_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(OWN.format(bases=bases, body=body))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(nc.UserError, match=re.escape(message)):
        nc.solve(COMPLETION, {section: {"kind": f"{module}:X"}}, output=tmp_path / "runs", progress=False)
    assert not (tmp_path / "runs" / COMPLETION).exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"solver.ranks": 3}, "solver.ranks is unknown"),
        ({"solver": {"kind": "scaled_asp"}}, 'Did you mean "scaled_asd"'),
        ({"iterations": 0}, "iterations = 0"),
        ({"tolerance": -1}, "tolerance = -1"),
        ({"solver_seconds": 0}, "solver_seconds = 0"),
        ({"targets": {"gap": [1]}}, "targets.gap is not a metric of this run; it measures observed_error"),
        ({"solver.rank": 61, **SMALL}, "rank"),
        ({"algorithm.rank": 3}, "algorithm is unknown"),
        ({"problem": "digits"}, 'problem.kind = "digits" is unknown; known: synthetic_completion, rating_completion'),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(nc.UserError) as error:
        nc.solve(COMPLETION, {**SMALL, **overrides}, output=tmp_path / "runs", progress=False)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_limit_of_time_ends_a_solve_and_not_its_iterations(tmp_path: Path) -> None:
    short = nc.solve(COMPLETION, {**SMALL, "solver_seconds": 1e-9}, output=tmp_path, progress=False)
    assert (short.file.stopped_by, short.file.iterations) == ("solver_seconds", 1)
    whole = nc.solve(COMPLETION, SMALL, output=tmp_path / "whole", progress=False)
    name = short.name
    resumed = nc.solve(COMPLETION, {**SMALL, "solver_seconds": None}, output=tmp_path, resume=name, progress=False)
    assert resumed.file.answer_sha256 == whole.file.answer_sha256


class Broken:
    """A solver whose residual is not a number from the third iteration on."""

    kind = "broken"

    def init(self, problem: Any, seed: int) -> dict[str, np.ndarray]:
        """Start at zero."""
        del problem, seed
        return {"count": np.zeros(1)}

    def step(self, problem: Any, state: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], StepResult]:
        """Count."""
        del problem
        return {"count": state["count"] + 1}, StepResult(np.nan if state["count"][0] >= 2 else 1.0)

    def answer(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the count."""
        return state


def test_a_solver_that_diverges_is_a_failed_run() -> None:
    solve: Any = load_solve(COMPLETION, ["problem.rows=60", "problem.fraction=0.5", "evaluate_every=100"])
    problem: Any = solve.problem_source.load()
    with pytest.raises(nc.RunFailed, match="diverged: residual nan after iteration 3"):
        list(iterations(problem, Broken(), solve, begin(problem, Broken(), 0)))  # type: ignore[arg-type]


def test_the_state_of_a_solve_survives_its_checkpoint() -> None:
    arrays = {"left": np.arange(6.0).reshape(2, 3), "norm": np.array(2.5)}
    state = SolveState(7, arrays, 1.5, 1e-300, "stalled")
    tensors, metadata = state.packed()
    again = SolveState.unpacked(tensors, metadata)
    assert (again.iteration, again.solver_seconds, again.residual, again.status) == (7, 1.5, 1e-300, "stalled")
    np.testing.assert_array_equal(again.arrays["left"], arrays["left"])
    assert again.arrays["norm"].shape == ()


def test_a_resume_command_names_the_solve(tmp_path: Path) -> None:
    runs = session.prepare_runs(str(POISSON), [], tmp_path)
    runs[0].folder.mkdir()  # as of one that has begun
    assert session.resume_command(runs) == f"narrowcast run --resume poisson --output {tmp_path}"


def test_replicas_of_one_problem_load_it_once(tmp_path: Path) -> None:
    runs = session.prepare_runs(str(POISSON), ["replicas.tolerance=[1e-3,1e-6]"], tmp_path)
    first, second = runs
    assert isinstance(first, PreparedSolve) and isinstance(second, PreparedSolve)
    assert first.problem is second.problem
    other = session.prepare_runs(str(POISSON), ["replicas.seed=[0,1]"], tmp_path)
    assert len({each.input.digest for each in other}) == 2


@pytest.mark.slow
def test_interrupted_replicas_are_resumed_as_far_as_they_have_begun(tmp_path: Path) -> None:
    def stop(row: Any) -> None:
        if row["run"].endswith("100"):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as stopped:
        nc.solve(POISSON, {"replicas.problem.points": [50, 100, 200]}, output=tmp_path, progress=stop)
    (note,) = stopped.value.__notes__
    assert note == f"resume with nc.run(resume=['poisson-points-50', 'poisson-points-100'], output='{tmp_path}')"
    first, second = nc.solve(resume=["poisson-points-50", "poisson-points-100"], output=tmp_path, progress=False)
    assert first.file.stopped_by == second.file.stopped_by == "tolerance"


def test_a_solve_is_shown_in_notebooks(solved: nc.SolveResult) -> None:
    page = solved._repr_html_()
    assert "conjugate_gradients on poisson, 165 iterations" in page
    assert "answer sha256" in page
    assert solved.plot().axes and solved.plot("error_iteration").axes
    with pytest.raises(nc.UserError, match="has no figure accuracy_time; it has error_iteration, error_time"):
        solved.plot("accuracy_time")


@pytest.mark.parametrize("value", [1e290, float("inf"), float("nan")])
def test_a_result_with_numbers_beyond_all_settings_is_read_back(
    solved: nc.SolveResult, value: float, tmp_path: Path
) -> None:
    shutil.copytree(solved.folder, tmp_path / "far")
    path = tmp_path / "far" / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "residual": value}))
    assert nc.load_run(tmp_path / "far").file.residual == pytest.approx(value, nan_ok=True)


def test_a_program_without_any_entry_to_fit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zeros.csv").write_text("row,column,value\n" + "".join(f"{k},{(k * k) % 7},0\n" for k in range(9)))
    problem = {"problem": {"kind": "entry_completion", "path": str(tmp_path / "zeros.csv")}, "targets": {}}
    with pytest.raises(nc.UserError, match="are all 0, which leaves nothing to fit"):
        nc.solve("completion-sdp", {**problem, "solver.rank": 3}, output=tmp_path / "runs", progress=False)
    assert not (tmp_path / "runs").exists()
