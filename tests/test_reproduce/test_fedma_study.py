"""The studies of FedMA: of its controls the runs in the repository, and the plans and tables of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from narrowcast.platform.models.hidden_units import units_to_match
from narrowcast.reproduce import fedma_digits, fedma_networks
from narrowcast.reproduce.fedma_digits import CELLS, METHODS, DigitsCell
from narrowcast.reproduce.fedma_table import digits_runs, judge_controls
from narrowcast.reproduce.light_run import light_run
from narrowcast.reproduce.long_runs import Queue
from narrowcast.reproduce.long_studies import Planned
from narrowcast.reproduce.results_csv import key_of
from narrowcast.reproduce.study_targets import STUDY_TARGETS
from planned_runs import ended

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


@pytest.mark.parametrize("name", fedma_networks.STUDIES)
def test_methods_of_a_network_have_equal_tries_and_rounds(name: str, tmp_path: Path) -> None:
    queue, settings = Queue([name], [tmp_path]), fedma_networks.STUDIES[name]

    def result(planned: Planned) -> dict[str, Any]:
        matched = "kind: fedma" in planned.spec.overrides[2]
        passes = next(
            int(each.removeprefix("rounds=")) for each in planned.spec.overrides if each.startswith("rounds=")
        )
        accuracy = 0.5 + 0.1 * matched + 0.001 * passes + 0.01 * ("rate-0.03" in planned.spec.label)
        final = {f"{split}.accuracy": accuracy + 1e-4 * planned.seed for split in ("validation", "test")}
        return {"final": final, "rounds": passes, "uplink_bits": 8_000_000 * passes, "downlink_bits": 8_000_000}

    each = [planned for job in ended(queue, result) for planned in job]
    methods = [len(setting.methods) for setting in settings]
    assert sum(not planned.test for planned in each) == 3 * sum(methods)
    assert all("rate-0.03" in planned.spec.label for planned in each if planned.test)
    for setting in settings:
        rounds = {cell.test([{"final": {}}]).configured(0, "run").rounds for cell in setting.cells}
        assert rounds == {passes * setting.layers for passes in setting.passes}
        experiment = setting.cells[0].tuning(0.03).configured(0, "run")
        layers = units_to_match(experiment.model, experiment.data_source.load()).counts
        assert setting.layers == len(layers) + 1
    verdicts, files = STUDY_TARGETS[name].finish(queue.rows, tmp_path / name)
    assert len(verdicts) == sum(len(setting.cells) for setting in settings)
    matched = next(verdict for verdict in verdicts if ", FedMA, " in verdict.what)
    assert float(matched.difference) == pytest.approx(10)
    assert f"{settings[0].layers} rounds, {settings[0].layers + 1} MB" in matched.what
    assert files[0].stat().st_size > 10_000
