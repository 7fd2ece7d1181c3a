"""Comparisons of optimisation methods: equal tries and bits, choice, table and plot."""

from __future__ import annotations

from pathlib import Path

import pytest

from narrowcast.studies.comparison import DeclaredCell
from narrowcast.studies.results import Rows
from narrowcast.studies.tuning import TUNING_SEED
from narrowcast_papers.narrow_links.table import COHORT, FEDAVG, FULL, MODELS
from papers import declared, plan, study

TRIES, SEEDS = 6, 5
NARROW = "rank 2, quantised"
ROUNDS = 60


def row(metric: str, accuracy: float, share: float = 1.0) -> dict[str, object]:
    bits = int(ROUNDS * COHORT * MODELS["narrow-links"][1] * 32 * share)
    return {"rounds": ROUNDS, "uplink_bits": bits, "downlink_bits": bits, "final": {metric: accuracy}}


def rows_of(cell: DeclaredCell, best: int, *accuracies: float, share: float = 1.0) -> Rows:
    """Return the rows of a cell whose try number `best` is the best on validation samples."""
    found = Rows()
    for place, value in enumerate(cell.grid):
        reached = 0.9 if place == best else 0.8
        found[cell.tuning(value), TUNING_SEED] = row("validation.accuracy", reached)
    tried = [found[cell.tuning(value), TUNING_SEED] for value in cell.grid]
    for seed, accuracy in enumerate(accuracies):
        found[cell.test(tried), seed] = row("test.accuracy", accuracy / 100, share)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_cell_has_as_many_tries_on_a_seed_of_its_own(name: str) -> None:
    planned = list(plan(name)(Rows()))
    assert len(planned) == len(declared(name)) * TRIES == len({each.spec.label for each in planned})
    assert {each.seed for each in planned} == {TUNING_SEED}
    assert not any(each.test for each in planned)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("narrow-links", marks=pytest.mark.data("mnist")),
        pytest.param("server-optimizers", marks=pytest.mark.data("mit-shakespeare")),
    ],
)
def test_every_method_is_an_experiment_of_its_model_with_as_many_rounds(name: str) -> None:
    data = None
    for cell in declared(name).values():
        experiment = cell.tuning(cell.grid[0]).configured(TUNING_SEED, "x")
        assert experiment.rounds == ROUNDS
        assert experiment.data.seed == TUNING_SEED  # type: ignore[attr-defined]
        data = experiment.data.load() if data is None else data
        model = experiment.model.init_server(data, 0)
        assert sum(values.size for values in model.values()) == MODELS[name][1]


def test_the_best_try_goes_to_the_test_and_is_compared_with_fedavg_and_with_itself(tmp_path: Path) -> None:
    fedavg, other = (95.0, 95.2, 94.9, 95.1, 95.3), (93.0, 93.1, 92.9, 93.2, 93.3)
    cells = declared("narrow-links")
    by_label = {
        **rows_of(cells[FULL, FEDAVG], 1, *fedavg).by_label,
        **rows_of(cells[FULL, "FedAdam"], 3, *other).by_label,
        **rows_of(cells[NARROW, FEDAVG], 0, *(each - 1 for each in fedavg), share=1 / 400).by_label,
        **rows_of(cells[NARROW, "FedAdam"], 5, *(each - 5 for each in other), share=1 / 400).by_label,
        **rows_of(cells[NARROW, "FedProx"], 5, *fedavg[: SEEDS - 1]).by_label,
    }
    rows = Rows(by_label)
    verdicts = {each.what: each for each in study("narrow-links").judge(rows)}
    assert len(verdicts) == 4
    assert verdicts[f"{FULL}: FedAdam"].difference == "-2.00"
    assert "rate 0.3, server_learning_rate: 0.1" in verdicts[f"{FULL}: FedAdam"].verdict
    narrow = verdicts[f"{NARROW}: FedAdam"]
    assert (narrow.difference, narrow.by_seed) == ("-6.00", pytest.approx([each - 5 for each in other]))
    assert "to its own float32 -5.00 (-5.00 to -5.00); uplink 1/400; rate 0.6" in narrow.verdict
    assert "to its own float32 -1.00" in verdicts[f"{NARROW}: {FEDAVG}"].verdict
    _, (png,) = study("narrow-links").finish(rows, tmp_path / "plot")
    assert png.stat().st_size > 10_000
