"""`narrowcast verify` of a solve finds changed answers, figures, labels and times, and nothing in an untouched one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import narrowcast as nc
from command_line import assert_refused, narrowcast
from narrowcast.platform.storage.journal import Journal, encoded
from narrowcast.runs.outputs import answer_sha256, write_model
from narrowcast.runs.verification import verify

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
COMPLETION = "completion-ill-conditioned"
SMALL = {
    "problem.rows": 60,
    "problem.fraction": 0.5,
    "iterations": 40,
    "tolerance": None,
    "checkpoint_every": 20,
    "targets.test.relative_error": [0.5],
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nc.solve(COMPLETION, SMALL, output=tmp_path_factory.mktemp("solves"), progress=False).folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / written.name))


def problems(folder: Path, count: int | None = None) -> dict[str, str]:
    return {check.subject: check.problem for check in verify(folder, count) if check.problem}


def rows(folder: Path) -> list[dict[str, Any]]:
    return [dict(row) for row in Journal.read(folder).rounds]


def rewrite(folder: Path, changed: Iterable[dict[str, Any]]) -> None:
    """Write the journal with right checksums, and its table."""
    checksum, lines = b"", []
    for row in changed:
        line, checksum = encoded({"iteration": row}, checksum)
        lines.append(line)
    (folder / "journal.jsonl").write_bytes(b"".join(lines))
    pq.write_table(Journal.read(folder).rounds_table(), folder / "iterations.parquet")


def result(folder: Path, **values: Any) -> dict[str, Any]:
    path = folder / "result.json"
    its: dict[str, Any] = json.loads(path.read_text()) | values
    path.write_text(json.dumps(its))
    return its


def headline(folder: Path) -> None:
    """Lower the error of the answer everywhere, as the last checkpoint and the answer do not tell it."""
    its = rows(folder)
    its[-1]["test.relative_error"] = 1e-12
    rewrite(folder, its)
    said = result(folder)
    best = {**said["best"], "test.relative_error": {"value": 1e-12, "iteration": its[-1]["iteration"]}}
    result(folder, final={**said["final"], "test.relative_error": 1e-12}, best=best)


def faster(folder: Path) -> None:
    """Divide the time of the solver by seven in journal, table and result."""
    its = [{**row, "solver_seconds": row["solver_seconds"] / 7} for row in rows(folder)]
    rewrite(folder, its)
    said = result(folder)
    targets = [{**each, "solver_seconds_to": each["solver_seconds_to"] / 7} for each in said["targets"]]
    result(folder, solver_seconds=its[-1]["solver_seconds"], targets=targets)


def earlier_target(folder: Path) -> None:
    its = rows(folder)
    first = next(row for row in its if "test.relative_error" in row)
    first["test.relative_error"] = 0.4
    rewrite(folder, its)
    said = result(folder)
    costs = {"iterations_to": first["iteration"], "solver_seconds_to": first["solver_seconds"]}
    result(folder, targets=[{**each, **costs} for each in said["targets"]])


def other_answer(folder: Path) -> None:
    """Change the answer and its sha256, and leave the figures."""
    answer = {name: values + 1e-3 for name, values in nc.load_run(folder).answer().items()}
    write_model(answer, folder / "answer.safetensors")
    result(folder, answer_sha256=answer_sha256(answer))


def test_a_solve_as_it_was_written_has_no_problem(folder: Path) -> None:
    for count in (0, 5, None):
        assert problems(folder, count) == {}
    (check,) = (each for each in verify(folder) if each.subject == "iterations repeated")
    assert (check.compared, check.skipped) == ("40 of 40 (100 %)", "")
    assert "milliseconds of the solver" in verify(folder, 0)[-1].skipped


@pytest.mark.parametrize(
    ("forge", "count", "subject", "problem"),
    [
        (headline, 0, "the answer's metrics", "test.relative_error is "),
        (other_answer, 0, "answer.safetensors", "is not that of the last state"),
        (faster, 0, "sums", "solver_seconds is not the sum of the rows' step_wall_seconds"),
        (faster, 0, "checkpoint of iteration 40", "solver_seconds is "),
        (earlier_target, None, "iterations 1 to 20", "repeated, test.relative_error is "),
        (lambda run: result(run, solver="mine"), 0, "labels", 'solver is "mine", not "scaled_asd"'),
        (lambda run: result(run, problem="netflix"), 0, "labels", 'problem is "netflix", not '),
        (lambda run: result(run, sizes={"rows": 10**6}), 0, "labels", "sizes is "),
        (lambda run: result(run, name="mine"), 0, "labels", f"name is mine, not {COMPLETION}"),
        (lambda run: result(run, stopped_by="tolerance"), 0, "result.json", "stopped_by is tolerance, not iterations"),
        (lambda run: result(run, best={}), 0, "result.json", "best is {}, not "),
        (lambda run: result(run, targets=[]), 0, "result.json", "targets is [], not "),
        (lambda run: result(run, wall_seconds=1e-3), 0, "result.json", "wall_seconds is "),
        (lambda run: (run / "result.json").write_text("{"), 0, "result.json", "unreadable"),
        (lambda run: (run / "iterations.parquet").unlink(), 0, "iterations.parquet", "unreadable"),
        (lambda run: (run / "answer.safetensors").unlink(), 0, "answer.safetensors", "unreadable"),
    ],
)
def test_a_forgery_is_found(
    folder: Path, forge: Callable[[Path], object], count: int | None, subject: str, problem: str
) -> None:
    forge(folder)
    assert problem in problems(folder, count).get(subject, ""), problems(folder, count)


def test_without_checkpoints_the_answer_is_measured_and_the_rest_repeated(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoint")
    assert problems(folder, 0) == problems(folder) == {}
    other_answer(folder)
    assert set(problems(folder, 0)) == {"the answer's metrics"}
    assert set(problems(folder)) == {"answer.safetensors"}  # it is compared with the end of the repeated iterations


def test_damage_is_one_line(folder: Path) -> None:
    path = folder / "journal.jsonl"
    path.write_bytes(b"x" + path.read_bytes())
    said = narrowcast("verify", folder)
    assert_refused(said, "checks failed; the first is journal: line 1: ", status=1)
    rewrite(folder, [{"iteration": 1}, {"iteration": 2}])
    assert "cannot be compared (KeyError: 'step_wall_seconds'" in problems(folder)["everything else"]


@pytest.mark.parametrize("limit", [None, 1e-9])
def test_iterations_that_a_resume_repeats_keep_the_time_that_the_journal_has(folder: Path, limit: float | None) -> None:
    """As after a kill -9 between two checkpoints; a limit of time does not end the solve before what was recorded."""
    (last,) = (folder / "checkpoint").glob("iteration-000000040*")
    for path in (last, folder / "result.json", folder / "answer.safetensors"):
        path.unlink()
    before = rows(folder)
    more = {"iterations": 50, "solver_seconds": limit}
    again = nc.solve(resume=folder.name, overrides=more, output=folder.parent, progress=False)
    after = rows(folder)
    assert after[:40] == before
    assert again.file.iterations == (50 if limit is None else 40)
    seconds = np.array([row["solver_seconds"] for row in after])
    assert (np.diff(seconds) > 0).all()
    np.testing.assert_allclose(seconds, np.cumsum([row["step_wall_seconds"] for row in after]), rtol=1e-9)
    assert again.file.solver_seconds == seconds[-1]
    assert problems(folder) == {}
