"""Which rounds a verification repeats: within its budget, from states that are kept, and any of them by chance."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from narrowcast.runs.checks import Budget, Leg, coverage, legs_of


def covered(legs: list[Leg]) -> list[int]:
    return [step for leg in legs for step in range(leg.origin + 1, leg.last + 1)]


def test_a_budget_is_a_number_of_steps_or_the_time_that_they_took() -> None:
    assert Budget(3).count(60, 1000.0) == 3
    assert Budget(90).count(60, 1000.0) == 60
    assert Budget().count(60, 19.9) == 60  # all took less than 20 seconds
    assert Budget().count(1000, 40.0) == 500
    assert Budget().count(60, 1e6) == 10
    assert Budget().count(6, 1e6) == 6
    assert Budget().count(60, float("nan")) == 60
    assert Budget().shared_by(4).count(1000, 40.0) == 125


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_drawn_the_budget_is_spent_on_steps_after_known_states(seed: int) -> None:
    draws = random.Random(seed)
    last = draws.randint(1, 60)
    kept = draws.sample(range(1, last + 1), draws.randint(0, min(3, last)))
    origins = {0, *kept}
    recorded = sorted({last, *kept, *draws.sample(range(1, last + 1), draws.randint(1, last))})
    count = draws.randint(0, last + 5)
    legs = legs_of(recorded, origins, count, random.Random(seed))
    steps = covered(legs)
    assert len(steps) == len(set(steps)) <= count
    assert all(leg.origin in origins and leg.last in recorded and leg.last <= leg.end <= last for leg in legs)
    assert all(leg.end in origins or leg.end == last for leg in legs)
    if recorded == list(range(1, last + 1)):
        assert len(steps) == min(count, last)
    if count >= last:
        assert steps == list(range(1, last + 1))


def test_the_first_and_the_last_rounds_go_first_and_every_other_is_drawn_sometimes() -> None:
    times: Counter[int] = Counter()
    for seed in range(400):
        times.update(covered(legs_of(range(1, 61), {0, 40, 50}, 25, random.Random(seed))))
    assert times[1] == times[60] == 400
    assert min(times[step] for step in (*range(1, 15), *range(41, 61))) > 20


def test_a_step_too_far_from_every_known_state_waits_for_a_larger_budget() -> None:
    steps = {step for seed in range(50) for step in covered(legs_of(range(1, 61), {0}, 10, random.Random(seed)))}
    assert steps == set(range(1, 11))


def test_the_verdict_says_what_was_repeated_and_what_was_not() -> None:
    check = coverage([Leg(0, 1, 50), Leg(50, 58, 60)], range(1, 61), "rounds", Budget(9, seed=8231))
    assert check.subject == "rounds repeated"
    assert check.compared == "9 of 60 (15 %): 1, 51 to 58; drawn with --seed 8231"
    assert check.skipped == "the other 51 rounds; --rounds 60 repeats all"
    assert coverage([Leg(0, 60, 60)], range(1, 61), "rounds", Budget(60)).skipped == ""
