"""The rule for tuned values: choice by means over seeds, and values at an edge of their grid are said."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from narrowcast.studies.results import Rows
from narrowcast.studies.spec import RunSpec
from narrowcast.studies.tuning import Choice, TunedCell, chosen, climbed_on, mean_result, tried, tuning_verdict

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


def test_a_search_on_lines_goes_to_the_best_mean_over_its_seeds() -> None:
    """The means of f(rate, gamma) = -(log2 rate - 2)^2 - 3 (gamma - 0.5)^2 are highest at (4, 0.5)."""
    ladders = {"rate": (1.0, 2.0, 4.0, 8.0), "gamma": (0.25, 0.5, 1.0)}

    def reached(rate: float, gamma: float) -> float:
        return -((math.log2(rate) - 2) ** 2) - 3 * (gamma - 0.5) ** 2

    def searched(diverges: float) -> tuple[tuple[float, ...], set[tuple[float, ...]]]:
        lines, best, done = list[dict[str, str]](), None, set[tuple[float, ...]]()
        while best is None:
            best, tried = climbed_on(lines, (1.0, 1.0), ladders, "loss", (7, 8), better=-1)
            for rate, gamma in set(tried) - done:
                mean = math.nan if rate == diverges else reached(rate, gamma)
                for seed, of_seed in ((7, mean - 1), (8, mean + 1), (9, 100.0)):  # 9 is not a tuning seed
                    values = {"rate": f"{rate:g}", "gamma": f"{gamma:g}", "loss": str(-of_seed)}
                    lines.append({"seed": str(seed), **values})
            done |= set(tried)
        return best, done

    best, tried = searched(diverges=0.0)
    assert best == (4.0, 0.5)
    assert {(2.0, 0.5), (8.0, 0.5), (4.0, 0.25), (4.0, 1.0)} <= tried
    assert (1.0, 0.25) not in tried
    assert searched(diverges=4.0)[0] == (2.0, 0.5)
