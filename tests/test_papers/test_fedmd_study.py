"""The study of FedMD's controls: its runs in the repository, its table, and that a row is what its run gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from narrowcast.studies.execution import light_run
from narrowcast_papers.fedmd.table import PAIRS
from papers import declared, queue_of, study

STUDY, SEEDS = "fedmd-digits", 20
PARTITIONS = ("classes alike", "Dirichlet(0.5) classes")


@pytest.mark.slow
def test_no_run_of_the_table_is_missing_and_a_row_is_what_its_run_gives() -> None:
    queue = queue_of(STUDY)
    assert not list(queue.missing())
    for method in ("FedMD", "public samples alone"):
        spec = declared(STUDY)["iid", method].test([])
        found, row = light_run(spec, 13), queue.rows[spec, 13]
        assert found["final"]["test.accuracy.mean"] == pytest.approx(row["final"]["test.accuracy.mean"], abs=1e-2)
        assert found["uplink_bits"] == row["uplink_bits"] == 10 * spec.configured(13, "one").rounds * (80 + 200 * 320)


def test_the_table_has_every_cell_and_the_differences_with_their_intervals(tmp_path: Path) -> None:
    rows = queue_of(STUDY).rows
    verdicts = {each.what: each for each in study(STUDY).judge(rows)}
    cells = {cell.name for cell in declared(STUDY).values()}
    assert cells < set(verdicts)
    assert len(verdicts) == len(cells) + len(PAIRS) * len(PARTITIONS)
    assert all(len(verdict.by_seed) == SEEDS for verdict in verdicts.values())
    for partition in PARTITIONS:
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
        name: cell.test([]).configured(0, "one").plain()["algorithm"]
        for (partition, name), cell in declared(STUDY).items()
        if partition == "iid" and name != "FedAvg, one architecture"
    }
    for with_it, without in PAIRS[0], PAIRS[3]:
        assert algorithms[without] == {**algorithms[with_it], "digest_epochs": 0}
