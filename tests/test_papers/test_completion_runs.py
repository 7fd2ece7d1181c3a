"""The cases of the completion benchmark, and timed solves of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from narrowcast.cli.many_runs import reproduce
from narrowcast.solves.completion_problems import SyntheticCompletion
from narrowcast.solves.descent import ScaledASD
from narrowcast.solves.factor_solver import Continuation
from narrowcast_papers.completion import solves as completion_runs
from narrowcast_papers.completion.solves import FLOOR, MEASUREMENTS, cases, milestones, seconds_to, solves_of, timed
from narrowcast_papers.completion.table import judge_report, judge_solved


def test_a_file_has_the_rows_that_tables_need() -> None:
    rows = [
        row("a", "x", place, error, 10 * error) for place, error in enumerate((2.0, 0.5, 0.4, 3e-5, 2e-5, 9e-6, 1e-5))
    ]
    rows[-1]["status"] = "time"
    kept = milestones(rows)
    assert [int(each["iteration"]) for each in kept] == [100, 300, 500, 600]
    for judge in (judge_solved, judge_report):
        cases_of = {("n1000-r2-p5-k2", "x", "1"): rows}, {("n1000-r2-p5-k2", "x", "1"): kept}
        assert judge(cases_of[0]) == judge(cases_of[1]) != []


def test_there_are_63_cases_of_which_36_were_published_as_solved() -> None:
    found = list(cases())
    assert len({case.name for case in found}) == 63
    assert Counter(case.published for case in found) == {"S": 36, "M": 7, "F": 20}
    hard = {(case.n, case.rank, case.fraction): case.oversampling for case in found if case.oversampling < 2}
    assert hard == {
        (1000, 200, 0.4): pytest.approx(1.111, abs=1e-3),
        (1000, 20, 0.05): pytest.approx(1.263, abs=1e-3),
        (10_000, 200, 0.05): pytest.approx(1.263, abs=1e-3),
    }
    assert len([case for case in found if case.rank <= 20]) == 48
    case = found[0]
    assert case.source(7) == SyntheticCompletion(rows=1000, rank=2, fraction=0.05, condition=2, seed=7)


def test_a_timed_solve_counts_its_start_and_ends_at_its_limits() -> None:
    problem = SyntheticCompletion(rows=100, rank=2, fraction=0.4).load()
    rows = list(timed(ScaledASD(continuation=Continuation()), problem, 0, 30.0))
    times = [row["seconds"] for row in rows]
    assert times == sorted(times) and 0 < rows[0]["start_seconds"] < times[0]
    assert [row["status"] for row in rows[:-1]] == [""] * (len(rows) - 1) and rows[-1]["status"] == "floor"
    assert rows[-1]["residual"] <= FLOOR and rows[-1]["test.unseen_error"] < 1e-11
    reached = seconds_to(rows, 1e-4, 30.0)
    assert reached in times and seconds_to(rows, 1e-4, reached / 2) is None and seconds_to(rows, 0, 30.0) is None
    (only,) = timed(ScaledASD(), problem, 0, 0.0)
    assert only["status"] == "time" and only["iteration"] == 1


def test_a_solve_whose_last_line_is_lost_is_made_again(tmp_path: Path) -> None:
    path, wanted = tmp_path / "completion.csv", ("n1000-r2-p40-k2", "scaled_asd+", 1)
    part = replace(MEASUREMENTS, planned=lambda _: [wanted])
    (last,) = part.made([], tmp_path)
    assert last["status"] == "floor"
    before = path.read_bytes()
    assert not list(part.made(part.read([tmp_path]), tmp_path))
    assert path.read_bytes() == before
    path.write_bytes(before[: before.rstrip().rfind(b"\n") + 1])
    assert solves_of(part.read([tmp_path])) == {}
    assert list(part.made(part.read([tmp_path]), tmp_path))
    ((key, rows),) = solves_of(part.read([tmp_path])).items()
    assert int(rows[0]["iteration"]) == 1
    assert key == ("n1000-r2-p40-k2", "scaled_asd+", "1") and seconds_to(rows, completion_runs.TARGET, 20) is not None


def row(case: str, solver: str, seconds: float, error: float, distance: float, status: str = "") -> dict[str, str]:
    found = {"seconds": seconds, "iteration": int(100 * seconds), "test.unseen_error": error}
    named = {"case": case, "solver": solver, "seed": 1, "status": status, "test.column_sum_error": distance}
    return {name: str(value) for name, value in {**named, **found}.items()}


def test_cases_are_judged_by_the_quickest_solver_and_by_the_reports_distance() -> None:
    easy, hard, late = "n1000-r2-p5-k200", "n1000-r200-p40-k2", "n1000-r20-p5-k2"
    solves = {
        (easy, "asd", "1"): [row(easy, "asd", 2, 0.1, 3, "time")],
        (easy, "scaled_asd+", "1"): [row(easy, "a", 1, 1e-3, 1), row(easy, "a", 2.5, 1e-5, 1e-12, "floor")],
        (easy, "gauss_newton+", "1"): [row(easy, "g", 3, 1e-12, 1e-12, "floor")],
        (hard, "asd", "1"): [row(hard, "asd", 30, 0.5, 0.3), row(hard, "asd", 60, 0.9, float("nan"), "diverged")],
        (late, "asd", "1"): [row(late, "asd", 61, 1e-6, 1e-10, "time")],
    }
    total, *verdicts = judge_solved(solves)
    assert (total.ours, total.verdict) == ("1 of 3", "of 63 cases, 3 were tried")
    assert {each.what: (each.ours, each.verdict) for each in verdicts} == {
        easy: ("2.50 s, scaled_asd+", "solved by 2 of 3"),
        late: ("error 1.0e-06", "not solved: out of time, with 1.26 entries for a degree of freedom"),
        hard: ("error 5.0e-01", "not solved: diverged, with 1.11 entries for a degree of freedom"),
    }
    verdicts = judge_report(solves)
    found = {each.what: (each.paper, each.ours, each.verdict) for each in verdicts if each.verdict != "not tried"}
    assert len(verdicts) == 6 + 21
    tried = "3 of 63 cases tried"
    assert found == {
        "distance below 1e-9, the report's solvers": ("36", "1", tried),
        "distance from 1e-9 to 1, the report's solvers": ("7", "1", tried),
        "distance of 1 or more, the report's solvers": ("20", "1", tried),
        "distance below 1e-9, all solvers": ("36", "2", tried),
        "distance from 1e-9 to 1, all solvers": ("7", "1", tried),
        "distance of 1 or more, all solvers": ("20", "0", tried),
        "n = 1000, r = 2, 5 %": ("S S S", "- S -", "1 the same"),
        "n = 1000, r = 20, 5 %": ("S S M", "S - -", "1 the same"),
        "n = 1000, r = 200, 40 %": ("M F F", "M - -", "1 the same"),
    }
    assert judge_solved({}) == judge_report({}) == []


@pytest.mark.slow
def test_the_table_is_drawn_from_a_file_of_solves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_runs, "SOLVERS", {"scaled_asd+": ScaledASD(continuation=Continuation())})
    command = ["completion", "--results", str(tmp_path), "--output", str(tmp_path / "out")]
    first = CliRunner().invoke(reproduce, [*command, "--time-limit", "0.001"], catch_exceptions=False).output
    assert "case n1000-r2-p5-k2, " in first and "1 of 1" in first and "solved by 1 of 1" in first
    again = CliRunner().invoke(reproduce, [*command, "--time-limit", "0"], catch_exceptions=False).output
    assert "case n1000" not in again and "1 of 1" in again
    assert "1 of 1" in (tmp_path / "out" / "completion.md").read_text()
