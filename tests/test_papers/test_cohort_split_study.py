"""Sum rates of cohorts in two bands: all rules on the same drops, and the table from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from narrowcast.cli.many_runs import reproduce
from narrowcast_papers.sdp import cohort_split as cohort_split_study
from narrowcast_papers.sdp.cohort_split import RULES, judge_splits, measure_drop
from papers import PAPERS


def test_a_drop_has_all_rules_and_more_tries_leave_no_more_within() -> None:
    rows = {row["rule"]: row for row in measure_drop(12, 3)}
    assert list(rows) == list(RULES)
    least = {rule: row["within"] for rule, row in rows.items()}
    assert least["local search, 100 starts"] <= least["local search, 10 starts"] <= least["local search, 1 start"]
    assert least["max_cut, 100 hyperplanes"] <= least["random, best of 100"]
    assert all(row["sum_rate"] > 0 and row["cpu_seconds"] > 0 for row in rows.values())


def test_differences_are_paired_by_drop() -> None:
    rows = [
        {"clients": "10", "drop": str(drop), "rule": rule, "sum_rate": str(20 + drop - place), "cpu_seconds": "0.001"}
        for drop in range(6)
        for place, rule in enumerate(RULES)
    ]
    found = {each.what: each for each in judge_splits(rows)}
    assert found["10 clients, greedy"].difference.startswith("-4.000 (-4.000")
    assert found["10 clients, max_cut, 100 hyperplanes"].ours.startswith("22.50 ± ")
    assert judge_splits([]) == []


def test_the_table_is_measured_once_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohort_split_study, "DROPS", 2)
    monkeypatch.setattr(cohort_split_study, "CLIENTS", (4, 6))
    command = ["sdp-cohort-split", "--papers", str(PAPERS), "--results", str(tmp_path), "--output", str(tmp_path)]
    CliRunner().invoke(reproduce, command, catch_exceptions=False)
    table, rows = (tmp_path / "sdp-cohort-split.md").read_text(), (tmp_path / "sdp-cohort-split.csv").read_bytes()
    assert "6 clients, max_cut, 100 hyperplanes" in table
    assert (tmp_path / "sdp-cohort-split.png").read_bytes().startswith(b"\x89PNG")
    CliRunner().invoke(reproduce, command, catch_exceptions=False)
    assert (tmp_path / "sdp-cohort-split.csv").read_bytes() == rows and rows.count(b"\n") == 1 + 4 * len(RULES)
