"""Laws of learning-rate schedules: of the factor of the learning rate in a round."""

from __future__ import annotations

import math
import pickle

from narrowcast.algorithms.local_training.rules import LearningRateSchedule
from narrowcast.laws.law import require

_STEPS_OF_A_ROUND = 7


def cases(schedule: LearningRateSchedule) -> dict[str, LearningRateSchedule]:
    """Return the only case."""
    return {"": schedule}


def _factors(schedule: LearningRateSchedule) -> list[list[float]]:
    """Return the factors at the steps of the first rounds, by round."""
    steps = range(_STEPS_OF_A_ROUND)
    return [[schedule.factor(index, (index - 1) * len(steps) + step) for step in steps] for index in range(1, 300)]


def factors_are_finite_and_above_zero(schedule: LearningRateSchedule) -> None:
    """Look at 299 rounds of seven steps."""
    for index, of_round in enumerate(_factors(schedule), start=1):
        require(
            all(math.isfinite(factor) and factor > 0 for factor in of_round),
            f"round {index} has the factors {of_round}",
        )


def a_factor_is_the_same_in_every_process(schedule: LearningRateSchedule) -> None:
    """Ask twice, the second time through pickle."""
    again: LearningRateSchedule = pickle.loads(pickle.dumps(schedule))
    require(_factors(schedule) == _factors(again), "the same round gives another factor")


def only_a_schedule_by_step_changes_within_a_round(schedule: LearningRateSchedule) -> None:
    """Compare the factors of each round."""
    changes = any(len(set(of_round)) > 1 for of_round in _factors(schedule))
    require(schedule.by_step or not changes, "the factor changes within a round, and by_step is False")


LAWS = (
    factors_are_finite_and_above_zero,
    a_factor_is_the_same_in_every_process,
    only_a_schedule_by_step_changes_within_a_round,
)
