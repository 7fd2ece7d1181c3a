"""Laws of learning-rate schedules, and of the server's step from the mean change of a tensor."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.federated.server_optimizer import ServerOptimizer
from narrowcast.algorithms.local_training.rules import LearningRateSchedule
from narrowcast.laws.law import require
from narrowcast.laws.small_tasks import digest
from narrowcast.platform.types import Arrays

_STEPS_OF_A_ROUND = 7
_ROUNDS, _SHAPE = 20, (3, 5)


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


SCHEDULE_LAWS = (
    factors_are_finite_and_above_zero,
    a_factor_is_the_same_in_every_process,
    only_a_schedule_by_step_changes_within_a_round,
)


def _changes() -> NDArray[np.float32]:
    return np.random.default_rng(0).normal(size=(_ROUNDS, *_SHAPE)).astype(np.float32)


def _steps(optimizer: ServerOptimizer) -> Iterator[tuple[NDArray[Any], Arrays]]:
    """Yield the direction and the slots of each round; changes and slots are read-only, as in a run."""
    slots = optimizer.init(np.zeros(_SHAPE, dtype=np.float32))
    for change in _changes():
        for array in (change, *slots.values()):
            array.flags.writeable = False
        direction, slots = optimizer.step(change, slots)
        yield direction, slots


def digest_of_optimizer(optimizer: ServerOptimizer) -> str:
    """Return the sha256 of the last direction and slots."""
    direction, slots = list(_steps(optimizer))[-1]
    return digest({"": direction, **slots})


def directions_and_slots_keep_their_shapes(optimizer: ServerOptimizer) -> None:
    """Take twenty steps along random changes."""
    initial = {name: values.shape for name, values in optimizer.init(np.zeros(_SHAPE, dtype=np.float32)).items()}
    for direction, slots in _steps(optimizer):
        require(direction.shape == _SHAPE, f"the direction of a tensor {list(_SHAPE)} is {list(direction.shape)}")
        now = {name: values.shape for name, values in slots.items()}
        require(now == initial, f"slots were {initial} and are {now}")
        require(all(np.isfinite(array).all() for array in (direction, *slots.values())), "a step is not finite")


def a_step_depends_on_its_arguments_alone(optimizer: ServerOptimizer) -> None:
    """Take the steps twice, the second time through pickle."""
    again: ServerOptimizer = pickle.loads(pickle.dumps(optimizer))
    for (first, slots), (second, slots_again) in zip(_steps(optimizer), _steps(again), strict=True):
        require(
            digest({"": first, **slots}) == digest({"": second, **slots_again}), "the same changes give another step"
        )


def the_first_step_goes_along_the_change(optimizer: ServerOptimizer) -> None:
    """Compare signs in the first round, and see that no change gives no step."""
    slots = optimizer.init(np.zeros(_SHAPE, dtype=np.float32))
    change = _changes()[0]
    direction, _ = optimizer.step(change, slots)
    require(float((direction * change).sum()) > 0, "the first step does not go along the mean change")
    still, _ = optimizer.step(np.zeros_like(change), slots)
    require(not still.any(), "the first step without a change moves the model")


OPTIMIZER_LAWS = (
    directions_and_slots_keep_their_shapes,
    a_step_depends_on_its_arguments_alone,
    the_first_step_goes_along_the_change,
)
