"""The channel ablation: its cells can be run, and its table compares what differs in one respect."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest

from narrowcast.studies.results import read_rows
from narrowcast_papers.channel.table import ML1M, MNIST, Ablation, Cell, ChannelTable, channel_results, describe_cell
from papers import targets


@pytest.mark.parametrize("ablation", [ML1M, MNIST], ids=lambda each: each.name)
def test_the_cells_are_experiments_that_differ(ablation: Ablation) -> None:
    runs = {cell: ablation.run(cell, next(iter(ablation.tries[cell.codec]))) for cell in ablation.cells}
    assert len({spec.label for spec in runs.values()}) == len(runs) == len(ablation.cells)
    experiments = {cell: spec.configured(0, spec.label) for cell, spec in runs.items()}
    assert len({str(each.radio) + str(each.algorithm) + str(each.fleet) for each in experiments.values()}) == len(runs)
    for scenario in ablation.scenarios:
        for codec, tries in ablation.tries.items():
            specs = [ablation.trial(scenario, codec, name) for name in tries]
            assert len({spec.label for spec in specs}) == 3
            assert all(spec.first_seed == 100 and spec.most_seeds == 1 for spec in specs)


def results(cell: Cell) -> list[dict[str, Any]]:
    """Return five seeds: 50 points, 2 more if adapted, a little more with each seed, and more bits in more time.

    Cells of one accuracy differ by up to a thousandth of a point.
    """
    bits = int(cell.seconds * 3e8 * (1.1 if cell.codec == "adapted" else 1.0))
    level = 0.5 + 0.02 * (cell.codec == "adapted")
    noises = [zlib.crc32(f"{describe_cell(cell)} {seed}".encode()) / 2**32 for seed in range(5)]
    values = [level + 0.001 * seed + 0.0001 * (seed % 2) + 1e-5 * noise for seed, noise in enumerate(noises)]
    return [{"final": {"test.hr@10": value}, "uplink_bits": bits, "rounds": 300} for value in values]


def test_cells_and_comparisons_have_a_row_each(tmp_path: Path) -> None:
    table = ChannelTable(ML1M, {cell: results(cell) for cell in ML1M.cells})
    rows = {row.what: row for row in table.judge()}
    for cell in ML1M.cells:
        assert rows[describe_cell(cell)].ours.startswith("52.2" if cell.codec == "adapted" else "50.2")
    gain = rows["adapted less fixed: shared, 16 ms, perfect, min_error"]
    assert gain.ours == "2.00 ± 0.00" and gain.verdict.startswith("differs by +2.00")
    assert rows["min_error less max_min: shared, 16 ms, perfect, max_min, adapted"].verdict.startswith("level")
    assert rows["error-6-db less perfect: own, 2 ms, perfect, max_min, adapted"].ours == "0.00 ± 0.00"
    assert rows["adapted less fixed, equal bits: shared, 16 ms, perfect, min_error, fixed"].ours == "2.00 ± 0.00"
    table.plot(tmp_path / "table.png")
    assert (tmp_path / "table.png").stat().st_size > 10_000


def test_cells_without_results_are_left_out() -> None:
    first, second = ML1M.cells[:2]
    table = ChannelTable(ML1M, {first: results(first), second: results(second)[:3]})
    assert [row.what for row in table.judge()][:2] == [describe_cell(first), describe_cell(second)]
    assert len(table.judge()) == 3 and len(table.judge()[2].by_seed) == 3


def test_each_cell_runs_with_the_best_of_its_tries() -> None:
    """The rows of the repository: seeds in order, and a cell's seeds end at the first that is not finished."""
    rows = read_rows([targets()["channel-ml1m"].results])
    found = channel_results(rows, ML1M)
    shared = next(cell for cell in ML1M.cells if cell.label == "shared-min_error-adapted-perfect-0.016s")
    spec = ML1M.run(shared, "error-0.4")
    assert [each["model_sha256"] for each in found[shared]] == [
        rows[spec, seed]["model_sha256"] for seed in range(len(found[shared]))
    ]
    assert len(found[shared]) >= 4
    del rows.by_label[spec.label, 1]
    assert len(channel_results(rows, ML1M)[shared]) == 1
    del rows.by_label[ML1M.trial(shared.scenario, "adapted", "error-3").label, 100]
    assert shared not in channel_results(rows, ML1M)
