"""The rule for tuned values: choice by means over seeds, and values at an edge of their grid are said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from narrowcast.studies.results import Rows
from narrowcast.studies.spec import RunSpec
from narrowcast.studies.tuning import Choice, TunedCell, chosen, mean_result, tried, tuning_verdict

RATES = (0.1, 0.2, 0.3)


@dataclass(frozen=True)
class Cell(TunedCell[float]):
    @property
    def grid(self) -> Sequence[float]:
        return RATES

    def spec(self, value: float, part: str) -> RunSpec:
        return RunSpec(f"{part or 'test'}-{value:g}", "fedavg-digits")


def _rows(by_rate: Mapping[float, Sequence[float | None]]) -> Rows:
    """Return the results of each rate from seed 100 on; None is a run that failed."""
    rows = Rows()
    for rate, accuracies in by_rate.items():
        for place, accuracy in enumerate(accuracies):
            rows[Cell().tuning(rate), 100 + place] = {
                "rounds": 10 * (place + 1),
                "final": {} if accuracy is None else {"validation.accuracy": accuracy},
            }
    return rows


def test_the_choice_of_three_seeds_is_that_of_their_mean_and_of_one_seed_its_own() -> None:
    rows = _rows({0.1: (0.9, 0.1, 0.2), 0.2: (0.5, 0.5, 0.5), 0.3: (0.4, 0.6, 0.2)})
    one, three = chosen(rows, Cell()), chosen(rows, Cell(), 3)
    assert one is not None and three is not None
    assert (one.label, three.label) == ("test-0.1", "test-0.2")
    assert tried(rows, Cell())[0] is rows[Cell().tuning(0.1), 100], "its own result, unchanged"
    assert tried(rows, Cell(), 3)[0]["rounds"] == 20
    assert tried(rows, Cell(), 4) == [], "one of the seeds is not finished"


def test_a_setting_that_fails_with_one_seed_is_not_chosen() -> None:
    rows = _rows({0.1: (0.9, None, 0.9), 0.2: (0.3, 0.3, 0.3), 0.3: (0.2, 0.2, 0.2)})
    three = chosen(rows, Cell(), 3)
    assert three is not None
    assert three.label == "test-0.2"
    assert mean_result([{"rounds": 1, "final": {}}] * 2)["final"] == {}


def test_values_at_an_edge_and_few_seeds_are_said() -> None:
    inside = Choice("A", "rate", 0.2, RATES, 3)
    top, bottom = (Choice(what, "rate", value, RATES, 3) for what, value in (("B", 0.3), ("C", 0.1)))
    lucky = Choice("D", "rate", 0.2, RATES, 1)
    nothing_below = Choice("E", "mu", 0.0, (0.0, 1.0), 5, least=0.0)
    assert [each.at_edge for each in (inside, top, bottom, lucky, nothing_below)] == [False, True, True, False, False]
    assert Choice("F", "mu", 0.5, (0.5, 1.0), 5, least=0.0).at_edge, "smaller values were not tried"
    assert inside.words == "rate 0.2 of 0.1 to 0.3, 3 tuning seeds"
    assert top.words == "rate 0.3, an edge of 0.1 to 0.3, 3 tuning seeds"
    assert lucky.words.endswith("1 tuning seed")
    assert tuning_verdict([inside, top, bottom, lucky, nothing_below]).verdict == (
        "3 seeds or more and no value at an edge: 2 of 5; at an edge: B (rate 0.3), C (rate 0.1); "
        "on fewer seeds: D (rate 0.2)"
    )
    assert tuning_verdict([inside]).verdict.endswith("at an edge: none; on fewer seeds: none")
