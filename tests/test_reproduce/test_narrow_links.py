"""The study of optimisation methods under narrow links: equal tries and bits, choice, table and plot."""

from __future__ import annotations

from pathlib import Path

import pytest

from narrowcast.reproduce.long_studies import STUDIES
from narrowcast.reproduce.narrow_links import (
    DENSE_BITS,
    FEDAVG,
    FULL,
    LINKS,
    METHODS,
    ROUNDS,
    SCAFFOLD,
    TEST_SEEDS,
    TRIES,
    TUNING_SEED,
    Cell,
    cells,
)
from narrowcast.reproduce.narrow_links_table import judge_narrow_links, plot_narrow_links
from narrowcast.reproduce.results_csv import Rows, key_of

NARROW = list(LINKS)[-1]


def row(metric: str, accuracy: float, share: float = 1.0) -> dict[str, object]:
    bits = int(ROUNDS * DENSE_BITS * share)
    return {"rounds": ROUNDS, "uplink_bits": bits, "downlink_bits": bits, "final": {metric: accuracy}}


def rows_of(cell: Cell, best: int, *accuracies: float, share: float = 1.0) -> Rows:
    """Return the rows of a cell whose try number `best` is the best on validation samples."""
    found: Rows = {}
    for place in TRIES:
        reached = 0.9 if place == best else 0.8
        found[key_of(cell.tuning(place), TUNING_SEED)] = row("validation.accuracy", reached)
    tried = [found[key_of(cell.tuning(place), TUNING_SEED)] for place in TRIES]
    for seed, accuracy in enumerate(accuracies):
        found[key_of(cell.test(tried), seed)] = row("test.accuracy", accuracy / 100, share)
    return found


def test_every_cell_has_as_many_tries_on_a_seed_of_its_own() -> None:
    planned = list(STUDIES["narrow-links"]({}))
    assert len(planned) == len(cells()) * len(TRIES) == len({each.spec.label for each in planned})
    assert {each.seed for each in planned} == {TUNING_SEED}
    assert not any(each.test for each in planned)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_an_experiment_and_scaffold_has_half_of_the_rounds(method: str) -> None:
    for link in LINKS:
        experiment = Cell(method, link).tuning(0).configured(TUNING_SEED, "x")
        assert experiment.rounds == (ROUNDS // 2 if method == SCAFFOLD else ROUNDS)
        assert experiment.data.seed == TUNING_SEED  # type: ignore[attr-defined]


def test_the_best_try_goes_to_the_test_and_is_compared_with_fedavg_and_with_itself(tmp_path: Path) -> None:
    fedavg, other = (95.0, 95.2, 94.9, 95.1, 95.3), (93.0, 93.1, 92.9, 93.2, 93.3)
    rows = {
        **rows_of(Cell(FEDAVG, FULL), 1, *fedavg),
        **rows_of(Cell("FedAdam", FULL), 3, *other),
        **rows_of(Cell(FEDAVG, NARROW), 0, *(each - 1 for each in fedavg), share=1 / 400),
        **rows_of(Cell("FedAdam", NARROW), 5, *(each - 5 for each in other), share=1 / 400),
        **rows_of(Cell("FedProx", NARROW), 5, *fedavg[: TEST_SEEDS - 1]),
    }
    verdicts = {each.what: each for each in judge_narrow_links(rows)}
    assert len(verdicts) == 4
    assert verdicts[f"{FULL}: FedAdam"].difference == "-2.00"
    assert "rate 0.1, server_learning_rate: 0.03" in verdicts[f"{FULL}: FedAdam"].verdict
    narrow = verdicts[f"{NARROW}: FedAdam"]
    assert (narrow.difference, narrow.by_seed) == ("-6.00", pytest.approx([each - 5 for each in other]))
    assert "to its own float32 -5.00 (-5.00 to -5.00); uplink 1/400; rate 0.3" in narrow.verdict
    assert "to its own float32 -1.00" in verdicts[f"{NARROW}: {FEDAVG}"].verdict
    plot_narrow_links(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
