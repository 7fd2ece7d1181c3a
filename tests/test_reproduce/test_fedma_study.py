"""The study of FedMA's controls: its runs in the repository, its table, and that the runs are what the rows say."""

from __future__ import annotations

from pathlib import Path

import pytest

from narrowcast.reproduce import fedma_digits
from narrowcast.reproduce.fedma_digits import CELLS, METHODS, DigitsCell
from narrowcast.reproduce.fedma_table import digits_runs, judge_controls
from narrowcast.reproduce.light_run import light_run
from narrowcast.reproduce.long_runs import Queue
from narrowcast.reproduce.results_csv import key_of
from narrowcast.reproduce.study_targets import STUDY_TARGETS

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_no_run_of_the_table_is_missing_and_a_row_is_what_its_run_gives() -> None:
    queue = Queue([fedma_digits.STUDY], [RESULTS])
    assert not list(queue.missing())
    for method in ("FedMA", "FedAvg, one round"):
        spec = DigitsCell(method, "different").run
        found, row = light_run(spec, 2), queue.rows[key_of(spec, 2)]
        assert found["final"]["test.accuracy"] == pytest.approx(row["final"]["test.accuracy"], abs=3e-3)
        assert found["downlink_bits"] == pytest.approx(row["downlink_bits"], rel=0.05)


def test_the_table_has_every_cell_and_the_differences_with_their_intervals(tmp_path: Path) -> None:
    rows = Queue([fedma_digits.STUDY], [RESULTS]).rows
    verdicts = {each.what: each for each in judge_controls(rows)}
    assert {cell.name for cell in CELLS} < set(verdicts)
    assert len(verdicts) == len(CELLS) + 8
    for cell, runs in digits_runs(rows).items():
        assert len(runs) == len(verdicts[cell.name].by_seed) == fedma_digits.SEEDS
        assert verdicts[cell.name].paper == f"{cell.expected:.1f}"
    less = verdicts["matched, last layer by class less by index, last layer by class, different starts"]
    assert float(less.difference) > 0
    _, files = STUDY_TARGETS["fedma-digits"].finish(rows, tmp_path / "fedma-digits")
    assert [path.name for path in files] == ["fedma-digits.png"]
    assert files[0].stat().st_size > 10_000


def test_methods_differ_in_one_part_each() -> None:
    runs = {method: DigitsCell(method, "same").run for method in METHODS}
    assert len({run.label for run in runs.values()}) == len(METHODS)
    passes = {method: run.configured(0, "one").rounds for method, run in runs.items()}
    assert [method for method, rounds in passes.items() if rounds == 4] == ["FedAvg, two rounds"]
