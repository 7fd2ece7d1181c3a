"""The settings of GIST as the report has them, and its table from a file of runs."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from narrowcast.algorithms.codecs.messages import DensePayload
from narrowcast.platform.data.synthetic import BlockModel
from narrowcast.platform.rounds.state import Run
from narrowcast.studies.tables import Effort
from narrowcast_papers.gist.table import (
    CITESEER,
    CORA,
    GIST_CORA,
    GistCell,
    experiment,
    judge_gist,
    measurements,
    rows_of,
)


def test_epochs_are_divided_and_rates_fall_after_half_and_three_quarters() -> None:
    built = experiment(GistCell("cora", "features", 8, 0.05), 3)
    schedule = built.training.learning_rate_schedule  # type: ignore[attr-defined]
    assert (built.rounds, built.clients_per_round, built.chunk_size, built.seed) == (50, 8, 1, 3)
    rates = [schedule.factor(each, 0) for each in (1, 25, 26, 37, 38, 50)]
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert built.data_source.projected_features == 1432  # type: ignore[attr-defined]
    seldom = experiment(GistCell("cora", "features", 8, 0.005, iterations=10), 0)
    schedule = seldom.training.learning_rate_schedule  # type: ignore[attr-defined]
    assert seldom.rounds == 5
    assert [schedule.factor(each, 0) for each in range(1, 6)] == pytest.approx([1, 1, 1, 0.1, 0.01])


def test_every_setting_is_an_experiment_that_fits_its_graph() -> None:
    data = BlockModel(clients=8, nodes=60, blocks=3, features=64, clusters=10).load()
    for cell in (*CORA, *CITESEER):
        built = experiment(cell, 0)
        Run(built, built.secured_algorithm, built.task(data)).check()


def test_names_of_settings_differ() -> None:
    names = [(cell.data, cell.name) for cell in (*CORA, *CITESEER)]
    assert len(set(names)) == len(names)


PART = measurements("gist-cora", CORA[:1])


def write_rows(path: Path, cell: GistCell, accuracies: list[float]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, PART.columns)
        writer.writeheader()
        for seed, accuracy in enumerate(accuracies):
            row = {"data": cell.data, "setting": cell.name, "seed": seed, "last": accuracy, "best": accuracy + 2}
            writer.writerow({**row, "at_best_validation": accuracy + 1, "uplink_bits": 8, "seconds": 1})


def test_a_mean_within_two_points_is_reproduced_and_another_is_not(tmp_path: Path) -> None:
    cell = CORA[0]
    assert isinstance(cell, GistCell)
    write_rows(tmp_path / "gist-cora.csv", cell, [75.0, 76.0, 80.0])
    last, best, chosen = judge_gist(CORA, rows_of(PART.read([tmp_path])))
    assert (last.paper, last.ours, last.difference) == ("75.64", "77.00 ± 2.65", "+1.36")
    assert last.verdict == "reproduced, within 2"
    assert (best.difference, best.by_seed) == ("-0.40", (77.0, 78.0, 82.0))
    assert chosen.verdict == "no published number"
    write_rows(tmp_path / "gist-cora.csv", cell, [70.0])
    assert judge_gist(CORA, rows_of(PART.read([tmp_path])))[0].verdict == "differs by more than 2"
    (png,) = GIST_CORA.finish(GIST_CORA.rows(tmp_path, tmp_path, Effort(seconds=0)), tmp_path / "gist-cora")[1]
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_line_that_was_cut_is_run_again(tmp_path: Path) -> None:
    cell = CORA[0]
    assert isinstance(cell, GistCell)
    path = tmp_path / "gist-cora.csv"
    write_rows(path, cell, [75.0, 76.0])
    path.write_bytes(path.read_bytes()[:-12])
    assert [row["seed"] for row in PART.read([tmp_path])] == ["0"]
    assert next(PART.missing(PART.read([tmp_path]))) == (cell.data, cell.name, 1)


@pytest.mark.slow
@pytest.mark.data("planetoid")
def test_eight_networks_learn_cora(tmp_path: Path) -> None:
    """One seed of the report's setting; without training, accuracy is about 0.14."""
    row = next(PART.made([], tmp_path))
    assert PART.read([tmp_path]) == [row]
    assert float(row["best"]) == pytest.approx(79.4, abs=4)
    slice_of = {"features": (179, 16), "bias": (16,), "scores": (16, 7), "output bias": (7,)}
    sent = DensePayload.of({name: np.zeros(shape, np.float32) for name, shape in slice_of.items()})
    assert int(row["uplink_bits"]) == 50 * 8 * sent.wire_bits()
    assert (row["setting"], row["seed"]) == ("features m=8 units=16 lr=0.05", "0")
    assert ("cora", CORA[0].name, 0) not in PART.missing(PART.read([tmp_path]))
