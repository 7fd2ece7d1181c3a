"""The cases of the completion benchmark, and timed solves of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from narrowcast.algorithms.completion.continuation import Continuation
from narrowcast.algorithms.completion.scaled_asd import ScaledASD
from narrowcast.algorithms.completion.synthetic_completion import SyntheticCompletion
from narrowcast.reproduce import completion_runs
from narrowcast.reproduce.completion_cases import cases
from narrowcast.reproduce.completion_runs import FLOOR, main, read, seconds_to, timed


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


def test_a_file_of_solves_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "solves.csv"
    command = ["--output", str(path), "--cases", "n1000-r2-p40-k2", "--seconds", "20"]
    said = CliRunner().invoke(main, [*command, "--solvers", "scaled_asd+"], catch_exceptions=False).output
    assert said.startswith("n1000-r2-p40-k2") and "solved in" in said and said.count("\n") == 1
    before = path.read_bytes()
    assert CliRunner().invoke(main, [*command, "--solvers", "scaled_asd+"], catch_exceptions=False).output == ""
    assert path.read_bytes() == before
    path.write_bytes(before[: before.rstrip().rfind(b"\n") + 1])  # its last row is lost
    assert read(path) == {}
    CliRunner().invoke(main, [*command, "--solvers", "scaled_asd+"], catch_exceptions=False)
    ((key, rows),) = read(path).items()
    assert int(rows[0]["iteration"]) == 1
    assert key == ("n1000-r2-p40-k2", "scaled_asd+", "1") and seconds_to(rows, completion_runs.TARGET, 20) is not None
