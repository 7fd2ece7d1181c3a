"""Solvers in other languages: a program, files in, iterates out; here Python in a process of its own, and Octave."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import narrowcast as nc
from narrowcast.laws.solver_laws import SOLVER_LAWS, SolverCase
from narrowcast.platform.config.trust import looking
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.types import Arrays, FloatArray, IntArray
from narrowcast.solve_run import Solve
from narrowcast.solves.completion_problems import Completion, SyntheticCompletion
from narrowcast.solves.max_cut import RandomMaxCut
from narrowcast.solves.program import Program

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "fixtures" / "descent_program.py"
PROBLEM = SyntheticCompletion(rows=30, columns=20, rank=2, fraction=0.5, seed=4)
PYTHON = (sys.executable, "-I", "-S")
DESCENT = Program(command=PYTHON, script=SCRIPT, parameters={"rank": 2, "rate": 0.05})


def after(solver: Program, iterations: int, problem: Completion | None = None) -> Arrays:
    return SolverCase(solver, problem or PROBLEM.load()).run(count=iterations).arrays


def test_its_iterates_are_those_of_the_same_steps_in_this_process() -> None:
    problem = PROBLEM.load()
    mask, matrix = np.zeros((30, 20)), np.zeros((30, 20))
    entries = problem.exported()["entries"]
    places = entries[:, 0].astype(int), entries[:, 1].astype(int)
    mask[places], matrix[places] = 1.0, entries[:, 2]
    left = np.cos(np.outer(np.arange(30), [1, 2]))
    right = np.sin(1 + np.outer(np.arange(20), [1, 2]))
    for _ in range(3):
        error = mask * (matrix - left @ right.T)
        left, right = left + 0.05 * error @ right, right + 0.05 * error.T @ left
    last = SolverCase(DESCENT, problem).run(count=3)
    np.testing.assert_allclose(last.arrays["left"], left, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(last.arrays["right"], right, rtol=1e-12, atol=1e-14)
    assert last.residual == pytest.approx(np.linalg.norm(mask * (matrix - left @ right.T)) / np.linalg.norm(matrix))


def test_the_exported_entries_are_the_observed_ones() -> None:
    problem = PROBLEM.load()
    entries = problem.exported()["entries"]
    assert len(entries) == problem.observed.count
    assert isinstance(problem.truth, tuple)
    whole = problem.truth[0] @ problem.truth[1].T
    np.testing.assert_allclose(whole[entries[:, 0].astype(int), entries[:, 1].astype(int)], entries[:, 2], rtol=1e-12)


def test_several_iterations_in_a_call_are_the_same_iterations() -> None:
    one, three = after(DESCENT, 6), after(DESCENT.model_copy(update={"inner_iterations": 3}), 2)
    for name in ("left", "right"):
        np.testing.assert_array_equal(one[name], three[name])


@pytest.mark.parametrize("law", SOLVER_LAWS, ids=lambda law: law.__name__)
def test_it_keeps_the_laws_of_solvers(law: Any) -> None:
    law(SolverCase(DESCENT, PROBLEM.load()))


@pytest.mark.slow
def test_a_solve_with_a_program_is_a_run_that_resumes(tmp_path: Path) -> None:
    def stop(row: Any) -> None:
        if row["iteration"] == 2:
            signal.raise_signal(signal.SIGINT)

    solve = Solve(problem=PROBLEM, solver=DESCENT, iterations=5, evaluate_every=1, name="descent")
    whole = nc.solve(solve, output=tmp_path / "whole", progress=False)
    errors = whole.iterations["test.relative_error"]
    assert errors.iloc[-1] < errors.iloc[0]
    with pytest.raises(KeyboardInterrupt):
        nc.solve(solve, output=tmp_path, progress=stop)
    again = nc.solve(resume="descent", output=tmp_path, progress=False)
    assert again.file.answer_sha256 == whole.file.answer_sha256


def program(folder: Path, text: str, **fields: Any) -> Program:
    """Return a solver whose program has this text after the start of a good one."""
    path = folder / "program.py"
    start = "import sys, time, subprocess\nfrom pathlib import Path\nfolder = Path(sys.argv[1])\n"
    good = "for name in ('left', 'right'):\n    (folder / 'out' / f'{name}.csv').write_text('1\\n2\\n')\n"
    path.write_text(f"{start}{good}(folder / 'out' / 'report.csv').write_text('0.5,0')\n{text}\n")
    return Program(command=PYTHON, script=path, **fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sys.exit('no licence')", "python.* ended with status 1: no licence"),
        ("(folder / 'out' / 'left.csv').write_text('1,nan')", "which has a value that is not a finite number"),
        ("(folder / 'out' / 'left.csv').write_text('1,2\\n3')", "left.csv, which is not a table of numbers"),
        ("(folder / 'out' / 'left.csv').write_text('')", "left.csv, which has no number"),
        ("(folder / 'out' / 'right.csv').unlink()", r"wrote no out/right.csv, only left; solver.answer_arrays names"),
        ("(folder / 'out' / 'report.csv').unlink()", r"wrote no out/report.csv; it is one line RESIDUAL,STATUS"),
        ("(folder / 'out' / 'report.csv').write_text('0.5')", "wrote the report 0.5; it is one line RESIDUAL,STATUS"),
        ("(folder / 'out' / 'report.csv').write_text('0.5,7')", "wrote the report 0.5,7; it is one line"),
        ("(folder / 'out' / 'report.csv').write_text('-1,0')", "wrote the report -1,0; it is one line"),
    ],
)
@pytest.mark.filterwarnings("ignore:loadtxt")
def test_a_bad_program_ends_the_solve_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RunFailed, match=message) as error:
        after(program(tmp_path, text), 2)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("own_session", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_a_program_is_killed_with_what_it_started(ends: bool, own_session: bool, tmp_path: Path) -> None:
    child = f"subprocess.Popen(['sh', '-c', 'sleep 60; true'], start_new_session={own_session})"
    text = f"child = {child}\nPath({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
    if ends:
        after(program(tmp_path, text), 1)
    else:
        with pytest.raises(RunFailed, match=r"did not end within 3 s; raise solver\.timeout_seconds"):
            after(program(tmp_path, text + "time.sleep(60)", timeout_seconds=3.0), 1)
    deadline, family = time.monotonic() + 10, int((tmp_path / "pid").read_text())
    while alive(family):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(group: int) -> list[psutil.Process]:
    """Return the processes of a group, or of the child that leads none, that have not ended."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if group in (each.pid, each.ppid(), os.getpgid(each.pid)) and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def test_a_program_that_is_only_looked_at_does_not_run(tmp_path: Path) -> None:
    with looking(tmp_path), pytest.raises(UserError, match=r"solver\.command = .* is code of the file's own"):
        DESCENT.check(PROBLEM.load())


@pytest.mark.parametrize(
    ("solver", "message"),
    [
        (Program(command=("no-such-program",)), "no program no-such-program is installed"),
        (Program(command=PYTHON, script=Path("no-such.m")), r"solver\.script = no-such\.m: there is no such file"),
    ],
)
def test_a_program_that_is_not_there_is_refused(solver: Program, message: str) -> None:
    with pytest.raises(UserError, match=message):
        solver.check(PROBLEM.load())


def test_a_problem_that_exports_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"has no method exported\(\), which gives programs its arrays"):
        DESCENT.check(RandomMaxCut(vertices=5, edges=4, seed=0).load())


@pytest.mark.slow
@pytest.mark.program("octave-cli")
def test_octave_gives_the_iterates_of_least_squares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT / "docs" / "examples")
    found = nc.solve("octave.yaml", output=tmp_path, progress=False)
    entries = found.config.problem_source.load().exported()["entries"]
    rows, columns, values = entries[:, 0].astype(int), entries[:, 1].astype(int), entries[:, 2]
    right = np.cos(np.outer(np.arange(1, 51), [1, 2]))
    for _ in range(found.file.iterations * found.config.solver.inner_iterations):
        left = least_squares(right, rows, columns, values, 60)
        right = least_squares(left, columns, rows, values, 50)
    np.testing.assert_allclose(found.answer()["left"], left, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(found.answer()["right"], right, rtol=1e-7, atol=1e-9)
    assert found.final["test.relative_error"] < 1e-4


def least_squares(other: FloatArray, own: IntArray, fixed: IntArray, values: FloatArray, count: int) -> FloatArray:
    """Return the least-squares rows of one factor, each from its own entries and the other factor."""
    return np.stack([np.linalg.lstsq(other[fixed[own == i]], values[own == i], rcond=None)[0] for i in range(count)])
