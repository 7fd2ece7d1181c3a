"""Laws of server optimizers: of the server's step from the mean change of one tensor."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.federated.server_optimizer import ServerOptimizer
from narrowcast.laws.law import require
from narrowcast.laws.small_tasks import digest
from narrowcast.platform.types import Arrays

_ROUNDS, _SHAPE = 20, (3, 5)


def cases(optimizer: ServerOptimizer) -> dict[str, ServerOptimizer]:
    """Return the only case."""
    return {"": optimizer}


def _changes() -> NDArray[np.float32]:
    return np.random.default_rng(0).normal(size=(_ROUNDS, *_SHAPE)).astype(np.float32)


def _steps(optimizer: ServerOptimizer) -> Iterator[tuple[NDArray[Any], Arrays]]:
    """Yield the direction and the slots of each round; what is given is read-only, as in a run."""
    slots = optimizer.init(np.zeros(_SHAPE, dtype=np.float32))
    for change in _changes():
        for given in (change, *slots.values()):
            given.flags.writeable = False
        direction, slots = optimizer.step(change, slots)
        yield direction, slots


def digest_of(optimizer: ServerOptimizer) -> str:
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


LAWS = (
    directions_and_slots_keep_their_shapes,
    a_step_depends_on_its_arguments_alone,
    the_first_step_goes_along_the_change,
)
