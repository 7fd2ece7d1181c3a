"""Semidefinite programs on the command line: cut files, unsatisfiable constraints and low ranks, a line each."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import assert_refused, narrowcast

QUIET = ("tracking.system_metrics=false", "targets={}")
FILES = {
    "cut.graph": "3 3\n1 2 1\n2 3 1\n",
    "cut.dat-s": "2\n1\n2\n1 1\n1 1 1 1 1\n2 1 2\n",
    "cut.csv": "row,column,value\n0,0,1\n0,1\n",
    "cut.txt": "anchor a 0 0\nanchor b 1 0\ndistance a s 1\ndistance b s\n",
    "infeasible.dat-s": "2\n1\n2\n1 2\n1 1 1 1 1\n2 1 1 1 1\n0 1 2 2 -1\n",
    "twice.csv": "row,column,value\n0,0,1\n1,1,2\n0,0,3\n",
    "lost.txt": "anchor a 0 0\nanchor b 1 0\ndistance a s 1\ndistance t u 1\n",
}


def words(kind: str, file: str, solver: str, folder: Path) -> tuple[object, ...]:
    for name, text in FILES.items():
        (folder / name).write_text(text)
    problem = f"problem={{kind: {kind}, path: {folder / file}}}"
    return ("run", "max-cut-g1", problem, f"solver={solver}", *QUIET, "--output", folder / "runs")


@pytest.mark.parametrize(
    ("kind", "file", "solver", "said"),
    [
        ("max_cut", "cut.graph", "mixing", "has 2 edges, but its first line says 3; is the file cut off?"),
        ("max_cut", "cut.graph", "burer_monteiro", "has 2 edges, but its first line says 3; is the file cut off?"),
        ("sdpa", "cut.dat-s", "burer_monteiro", "entry 2 is '2 1 2'; is the file cut off?"),
        ("entry_completion", "cut.csv", "burer_monteiro", "cut.csv"),
        ("sensor_distances", "cut.txt", "burer_monteiro", "line 4 is 'distance b s'; give lines"),
        ("sdpa", "infeasible.dat-s", "burer_monteiro", "no positive semidefinite matrix of a trace up to"),
        ("entry_completion", "twice.csv", "burer_monteiro", "twice.csv"),
        ("sensor_distances", "lost.txt", "lifted_stress", "have no path of measured distances to an anchor"),
    ],
)
def test_files_and_constraints_that_cannot_be_used_are_one_line(
    kind: str, file: str, solver: str, said: str, tmp_path: Path
) -> None:
    assert_refused(narrowcast(*words(kind, file, solver, tmp_path)), file.partition(".")[0], said)


def test_a_rank_below_the_bound_is_one_line_of_a_finished_solve(tmp_path: Path) -> None:
    problem = "problem={kind: random_max_cut, vertices: 30, edges: 60, roundings: 0}"
    for solver in ("mixing", "burer_monteiro"):
        settings = (problem, f"solver={{kind: {solver}, rank: 2}}", "iterations=3", *QUIET)
        said = narrowcast("run", "max-cut-g1", *settings, "--output", tmp_path / solver)
        assert said.status == 0, said.err
        assert said.err.startswith("WARNING: rank 2 is below ")
        assert said.err.count("\n") == 1
