"""Measurements of a table: each is made once, and a file that was cut is gone on with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from narrowcast.platform.errors import UserError
from narrowcast.studies.results import Line, Lines, read_lines
from narrowcast.studies.tables import Effort, MeasuredTable, Measurements
from narrowcast.studies.verdicts import PaperVerdict


def table(made: list[tuple[str, float]]) -> MeasuredTable:
    """Return a table of two lines a measurement; the last key is chosen by what the others have."""

    def planned(lines: Lines) -> Iterator[tuple[str, float]]:
        yield from (("tried", value) for value in (0.5, 2.0))
        best = max((line for line in lines if line["what"] == "tried"), key=lambda line: float(line["square"]))
        yield "chosen", float(best["value"])

    def measure(what: str, value: float) -> Iterator[Line]:
        made.append((what, value))
        yield {"square": value**2, "end": None}
        yield {"square": value**2 + 1 / 3, "end": "done"}

    part = Measurements("squares.csv", ("what", "value"), ("square", "end"), planned, measure, digits=3)
    return MeasuredTable((part,), lambda lines: [PaperVerdict(line["what"], "", line["square"], "") for line in lines])


def test_each_measurement_is_made_once_and_later_ones_see_earlier_ones(tmp_path: Path) -> None:
    made: list[tuple[str, float]] = []
    rows = table(made).rows(tmp_path / "kept", tmp_path, Effort())
    assert made == [("tried", 0.5), ("tried", 2.0), ("chosen", 2.0)]
    assert table(made).finish(rows, tmp_path)[0][-1].ours == "4.33"
    assert rows == table(made).rows(tmp_path / "kept", tmp_path, Effort())
    assert len(made) == 3
    assert read_lines(tmp_path / "squares.csv") == list(rows[0])


def test_a_measurement_without_its_last_line_or_with_a_cut_one_is_made_again(tmp_path: Path) -> None:
    made: list[tuple[str, float]] = []
    table(made).rows(tmp_path, tmp_path, Effort())
    whole = (tmp_path / "squares.csv").read_text()
    for kept in (whole.rpartition("chosen,2,4.33")[0], whole.rpartition(",done")[0]):
        (tmp_path / "squares.csv").write_text(kept)
        made.clear()
        table(made).rows(tmp_path, tmp_path, Effort())
        assert made == [("chosen", 2.0)]


def test_no_time_measures_nothing_and_a_moment_one(tmp_path: Path) -> None:
    made: list[tuple[str, float]] = []
    assert table(made).rows(tmp_path, tmp_path, Effort(seconds=0)) == ([],)
    table(made).rows(tmp_path, tmp_path, Effort(seconds=1e-9))
    assert made == [("tried", 0.5)]


def test_keys_that_a_plan_waits_for_are_asked_for_once() -> None:
    def planned(lines: Lines) -> Iterator[tuple[str]]:
        while not lines:
            yield from (("first",), ("second",))
        yield ("third",)

    part = Measurements("", ("what",), ("square",), planned, lambda _: [])
    assert list(part.missing([])) == [("first",), ("second",)]
    assert list(part.missing([{"what": "first", "square": "1"}])) == [("third",)]


def test_a_plan_that_waits_for_what_lines_of_another_version_lack_is_refused() -> None:
    def planned(lines: Lines) -> Iterator[tuple[str]]:
        while not any(line["square"] == "4" for line in lines):
            yield ("first",)

    part = Measurements("squares.csv", ("what",), ("square",), planned, lambda _: [])
    with pytest.raises(UserError, match=r"squares\.csv: its lines of what first are not those .* remove them"):
        list(part.missing([{"what": "first", "square": "1"}]))
