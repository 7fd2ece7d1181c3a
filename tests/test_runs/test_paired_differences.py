"""Differences by seed, what is bold, columns and patterns of a comparison, by SciPy and by hand."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from test_comparison import write_run, write_seeds

import narrowcast as nc
from command_line import assert_refused, narrowcast
from narrowcast.runs.comparison import Comparison

OURS, OTHER, BASE = [0.66, 0.64, 0.69, 0.65], [0.61, 0.66, 0.65, 0.62], [0.62, 0.63, 0.64, 0.60]


def write_groups(output: Path) -> None:
    write_seeds(output, "ours", [0, 1, 2, 3], OURS)
    write_seeds(output, "other", [0, 1, 2, 3], OTHER)
    write_seeds(output, "base", [3, 2, 1, 0], BASE[::-1])  # in another order


def shown(comparison: Comparison, column: str) -> list[str]:
    table = comparison.results_table()
    return [row[list(table.heads).index(column)] for row in table.rows]


def test_differences_are_paired_by_seed_with_intervals_and_holms_correction(tmp_path: Path) -> None:
    write_groups(tmp_path)
    found = nc.compare(["ours-*", "other-*", "base-*"], output=tmp_path, against="base-*").paired_differences()
    found = found[found.metric == "test.hr@10"].set_index("run")
    tests = {name: stats.ttest_rel(values, BASE) for name, values in (("ours", OURS), ("other", OTHER))}
    for name, test in tests.items():
        row = found.loc[f"{name} (4 seeds)"]
        interval = test.confidence_interval(0.95)
        assert row.pairs == 4
        assert row.difference == pytest.approx(np.subtract(OURS if name == "ours" else OTHER, BASE).mean())
        assert (row.low, row.high, row.p) == pytest.approx((interval.low, interval.high, test.pvalue))
    smaller, larger = sorted(test.pvalue for test in tests.values())
    by_hand = {smaller: 2 * smaller, larger: max(2 * smaller, larger)}  # Holm: times 2, then times 1, never below
    assert found.p_holm.tolist() == pytest.approx([by_hand[test.pvalue] for test in tests.values()])


def test_only_seeds_of_both_groups_are_paired(tmp_path: Path) -> None:
    write_seeds(tmp_path, "ours", [0, 1, 2, 7], OURS)
    write_seeds(tmp_path, "base", [1, 2, 3], BASE[:3])
    write_seeds(tmp_path, "alone", [3], [0.7])
    found = nc.compare("*", output=tmp_path, against="base").paired_differences(metrics=["test.hr@10"]).set_index("run")
    row = found.loc["ours (4 seeds)"]
    assert (row.pairs, row.difference) == (2, pytest.approx(np.mean([0.64 - 0.62, 0.69 - 0.63])))
    one = found.loc["alone-seed-3"]
    assert (one.pairs, one.difference) == (1, pytest.approx(0.7 - 0.64))
    assert one[["low", "high", "p", "p_holm"]].isna().all()
    assert row.p_holm == row.p  # one test with an interval


def test_the_table_of_differences_is_shown_in_percentage_points_and_written_as_csv(tmp_path: Path) -> None:
    write_groups(tmp_path)
    words = ("compare", "*", "--against", "base-seed-0", "--output", tmp_path, "--columns", "test.hr@10")
    said = narrowcast(*words, "--csv", tmp_path / "a.csv")
    assert said.status == 0, said.err
    test = stats.ttest_rel(OURS, BASE)
    low, high = test.confidence_interval(0.95)
    (line,) = (each for each in said.out.splitlines() if each.startswith("ours (4 seeds)") and " to " in each)
    assert line.split()[3:] == [
        *("test", "HR@10", "4", f"{100 * np.subtract(OURS, BASE).mean():+.2f}", f"{100 * low:+.2f}", "to"),
        *(f"{100 * high:+.2f}", f"{test.pvalue:.3f}", f"{2 * test.pvalue:.3f}"),
    ]
    assert "Each run minus base (4 seeds), seed by seed; those of percentages are in percentage points." in (
        " ".join(said.out.split())
    )
    rows = list(csv.DictReader((tmp_path / "a-differences.csv").read_text().splitlines()))
    assert [row["run"] for row in rows] == ["other (4 seeds)", "ours (4 seeds)"]
    assert float(rows[1]["p"]) == pytest.approx(test.pvalue)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--against", "bse"),
            "against bse: no run is called so; give the name of one group, or of a run in it: base",
        ),
        (("--against", "o*"), "against o*: other (4 seeds), ours (4 seeds) match it; give the name of one group"),
        (
            ("--columns", "test.hr@1"),
            'no column "test.hr@1"; usual ones are algorithm, data, seeds, rounds, test.hr@',
        ),
        (("--columns", "wall_second"), 'Did you mean "wall_seconds"?'),
    ],
)
def test_unknown_groups_and_columns_are_refused_before_anything_is_written(
    words: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    write_groups(tmp_path)
    assert_refused(narrowcast("compare", "*", *words, "--output", tmp_path), message)
    assert not (tmp_path / "compare.png").exists()


@pytest.mark.parametrize(
    ("ours", "theirs", "bold"),
    [
        ([0.6575 - 0.042, 0.6575 + 0.042], [0.6446 - 0.025, 0.6446 + 0.025], []),  # of two seeds, intervals overlap
        ([0.70, 0.71, 0.72], [0.50, 0.51, 0.52], [0]),
        ([0.50, 0.51, 0.52], [0.70, 0.71, 0.72], [1]),
        ([0.70, 0.71, 0.72], [0.60], []),  # nobody knows the spread of one seed
        ([0.70], [0.60], [0]),  # single runs are compared as they are
    ],
)
def test_a_mean_is_bold_if_its_interval_is_apart_from_the_others(
    ours: list[float], theirs: list[float], bold: list[int], tmp_path: Path
) -> None:
    write_seeds(tmp_path, "ours", list(range(len(ours))), ours)
    write_seeds(tmp_path, "theirs", list(range(len(theirs))), theirs)
    comparison = nc.compare(["ours-*", "theirs-*"], output=tmp_path)
    assert sorted(row for row, _ in comparison.results_table().bold) == bold
    assert comparison.latex().count(r"\textbf") == len(bold)


def test_columns_can_be_chosen_in_table_latex_and_csv(tmp_path: Path) -> None:
    write_groups(tmp_path)
    columns = ["total_bits", "validation.hr@10", "algorithm.kind", "wall_seconds", "seed"]
    comparison = nc.compare(["ours-*", "base-*"], output=tmp_path, columns=columns)
    heads = ["run", "algorithm.kind", "total", "validation\nHR@10", "wall\ntime", "seed"]
    assert list(comparison.results_table().heads) == heads
    assert shown(comparison, "seed") == ["0, 1, 2, 3", "0, 1, 2, 3"]
    assert shown(comparison, "algorithm.kind") == ["ours", "base"]
    assert "wall time" in comparison.latex()
    of_file = nc.compare(["ours-*", "base-*"], output=tmp_path, columns=["test.hr@10"]).latex()
    assert r"run & test HR@10 \\" in of_file
    assert "wall" not in nc.compare(["ours-*"], output=tmp_path).latex()  # unless it is asked for
    path = tmp_path / "a.csv"
    said = narrowcast("compare", "ours-*", "--columns", ",".join(columns), "--output", tmp_path, "--csv", path)
    assert said.status == 0, said.err
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert list(rows[0]) == ["run", *columns]
    assert [(row["run"], row["total_bits"], row["algorithm.kind"], row["seed"]) for row in rows] == [
        (f"ours-seed-{seed}", "8160000000", "ours", str(seed)) for seed in range(4)
    ]


def test_a_comparison_prints_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_groups(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    lines = str(nc.compare("*", output=tmp_path)).splitlines()
    (row,) = (each for each in lines if each.startswith("ours (4 seeds)") and "±" in each)
    assert row.split()[3:5] == ["scolr", "ml-1m"]
    assert "Comparison(" not in "\n".join(lines)


def test_patterns_are_of_finished_runs_in_natural_order_and_each_run_is_one_row(tmp_path: Path) -> None:
    for seed in (10, 9, 1):
        write_run(tmp_path / f"fedavg-{seed}", seed=seed)
    (tmp_path / "fedavg-11").mkdir()
    (tmp_path / "fedavg-11" / "config.yaml").write_text("name: fedavg-11\n")  # not finished
    write_run(tmp_path / "grid" / "cell-1")
    write_run(tmp_path / "fedavg-[1]")

    def names(*given: Any) -> list[str]:
        return [run.name for run in nc.compare(given, output=tmp_path).runs]

    assert names("fedavg-?", "fedavg-10") == ["fedavg-1", "fedavg-9", "fedavg-10"]
    assert names("fedavg-*", "fedavg-1", tmp_path / "fedavg-9") == ["fedavg-1", "fedavg-9", "fedavg-10", "fedavg-[1]"]
    assert names(f"{tmp_path}/fedavg-1*") == ["fedavg-1", "fedavg-10"]
    assert names("fedavg-[1]") == ["fedavg-[1]"]  # a folder of this name comes first
    assert names("gri*") == ["cell-1"]
    with pytest.raises(
        nc.UserError, match=r"no finished run matches scolr-\*; finished runs in .*: fedavg-1, fedavg-9"
    ):
        names("scolr-*")
    with pytest.raises(nc.UserError, match=r"has no result\.json"):
        names("fedavg-11")
