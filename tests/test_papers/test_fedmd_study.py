"""The study of FedMD's controls: its runs in the repository, its table, and that a row is what its run gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from narrowcast.studies.execution import light_run
from narrowcast_papers.fedmd import table as fedmd_digits
from narrowcast_papers.fedmd.table import (
    CELLS,
    METHODS,
    PAIRS,
    PARTITIONS,
    DistilledCell,
    distilled_runs,
    judge_distillation,
)
from papers import queue_of, study


def test_no_run_of_the_table_is_missing_and_a_row_is_what_its_run_gives() -> None:
    queue = queue_of(fedmd_digits.STUDY)
    assert not list(queue.missing())
    for method in ("FedMD", "public samples alone"):
        spec = DistilledCell(method, "iid").run
        found, row = light_run(spec, 13), queue.rows[spec, 13]
        assert found["final"]["test.accuracy.mean"] == pytest.approx(row["final"]["test.accuracy.mean"], abs=1e-2)
        assert found["uplink_bits"] == row["uplink_bits"] == 10 * spec.configured(13, "one").rounds * (80 + 200 * 320)


def test_the_table_has_every_cell_and_the_differences_with_their_intervals(tmp_path: Path) -> None:
    rows = queue_of(fedmd_digits.STUDY).rows
    verdicts = {each.what: each for each in judge_distillation(rows)}
    assert {cell.name for cell in CELLS} < set(verdicts)
    assert len(verdicts) == len(CELLS) + len(PAIRS) * len(PARTITIONS)
    assert all(len(runs) == fedmd_digits.SEEDS for runs in distilled_runs(rows).values())
    for _, partition in PARTITIONS.values():
        gain = verdicts[f"FedMD less alone, {partition}"]
        alone, fedmd = (np.array(verdicts[f"{name}, {partition}"].by_seed) for name in ("alone", "FedMD"))
        assert (
            float(gain.difference) == pytest.approx(float(np.mean(fedmd - alone)), abs=0.006)
            and gain.verdict[:3] == "off"
        )
    _, files = study("fedmd-digits").finish(rows, tmp_path / "fedmd-digits")
    assert [path.name for path in files] == ["fedmd-digits.png"]
    assert files[0].stat().st_size > 10_000


def test_clients_that_train_alone_differ_from_fedmd_in_digestion_only() -> None:
    algorithms = {
        name: DistilledCell(name, "iid").run.configured(0, "one").plain()["algorithm"]
        for name in METHODS
        if name != "FedAvg, one architecture"
    }
    for with_it, without in PAIRS[0], PAIRS[3]:
        assert algorithms[without] == {**algorithms[with_it], "digest_epochs": 0}
