"""The attacks do no better than the bounds of docs/secure.md, which are those of benchmarks/attacks.csv."""

from __future__ import annotations

from pathlib import Path

import pytest

import attacks
from attack_cells import READABLE, measure_cell
from sampling import sampled

ROOT = Path(__file__).parents[2]
ROWS = list(attacks.read(attacks.CSV).values())
BOUNDS = {key: row["bound"] for key, row in attacks.read(attacks.CSV).items()}


def test_the_documentation_has_the_bounds() -> None:
    text = (ROOT / "docs" / "secure.md").read_text()
    assert "\n".join(attacks.table_of_bounds(ROWS)) in text
    assert "\n".join(attacks.table_of_repeats(ROWS)) in text


def test_no_value_is_read_by_having_a_round_answered_again() -> None:
    repeats = [row for row in ROWS if row["attack"].startswith("repeated round")]
    assert {row["mode"] for row in repeats} == set(attacks.REPEATED)
    assert len(repeats) == 8 * len(attacks.REPEATED)
    assert {(row["after"], row["bound"], row["basis"]) for row in repeats} == {("0.000", "0.00", "theory")}
    assert all(int(row["cases"]) > 3000 for row in repeats)
    assert sum(float(row["before"]) for row in repeats) == 3 * 7 - 1  # two lists, and a model that is signed


def test_every_cell_is_measured_and_within_its_bound() -> None:
    cells = {(row["mode"], row["cohort"], row["rounds"]) for row in ROWS if row["after"]}
    whole = {
        (mode, str(cohort), str(count))
        for mode in attacks.MODES
        for cohort in attacks.COHORTS
        for count in attacks.ROUNDS
    }
    assert whole - cells <= {("ckks, smallest_count", "60", "50")}
    for row in ROWS:
        if row["after"] and row["bound"]:
            assert float(row["after"]) <= float(row["bound"]), row
            assert row["basis"] in ("theory", "measured", "nothing is protected")


def check(mode: str, cohort: int, rounds: list[int], *settings: str) -> None:
    checked = 0
    for result in measure_cell(mode, cohort, rounds, *settings):
        if bound := BOUNDS.get((mode, result.attack, str(cohort), str(result.rounds))):
            assert result.found <= float(bound), result
            checked += 1
    assert checked >= len(rounds)


@pytest.mark.parametrize("mode", [mode for mode in attacks.MODES if mode not in READABLE])
def test_the_attacks_do_no_better_on_another_seed(mode: str) -> None:
    check(mode, 5 if mode.startswith("ckks") else 10, [1, 5], "seed=1")


@pytest.mark.slow
@pytest.mark.parametrize("cohort", sampled([5, 10, 20], [10]))
@pytest.mark.parametrize("mode", ["masked", "masked, unequal ranks"])
def test_the_attacks_do_no_better_over_fifty_rounds(mode: str, cohort: int) -> None:
    check(mode, cohort, [1, 5, 50], "seed=2")
