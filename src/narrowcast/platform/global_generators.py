"""The global generators of torch, NumPy and Python, from which code of others draws: seeded, restored and compared.

Code of the package draws from keyed streams (`seeds`) alone. What others write, such as a module with dropout, draws
from generators that a whole process shares, whose states depend on all that ran before. Such code runs inside
`isolated`, which seeds them and restores what they were.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

States = Mapping[str, Any]
"""The state of each generator, by its name."""

_LOW_WORD = 2**32 - 1


@dataclass(frozen=True)
class _Generator:
    """A global generator: its state, in a form that can be compared, and how it is set."""

    state: Callable[[], Any]
    restore: Callable[[Any], None]
    seed: Callable[[int], None]


def _torch_state() -> tuple[bytes, ...]:
    import torch

    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return tuple(state.numpy().tobytes() for state in states)


def _restore_torch(states: tuple[bytes, ...]) -> None:
    import torch

    of_cpu, *of_cuda = (torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states)
    torch.set_rng_state(of_cpu)
    for index, state in enumerate(of_cuda):
        torch.cuda.set_rng_state(state, index)


def _seed_torch(word: int) -> None:
    import torch

    torch.default_generator.manual_seed(word)  # torch.manual_seed asks for every accelerator, which takes 0.1 ms
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(word)


GENERATORS: Mapping[str, _Generator] = {
    "torch": _Generator(_torch_state, _restore_torch, _seed_torch),
    "numpy.random": _Generator(
        lambda: pickle.dumps(np.random.get_state()),
        lambda state: np.random.set_state(pickle.loads(state)),
        lambda word: np.random.seed([word & _LOW_WORD, word >> 32]),
    ),
    "random": _Generator(random.getstate, random.setstate, random.seed),
}
"""The generators by the name of their module."""


def seed_generators(word: int, names: Collection[str] = tuple(GENERATORS)) -> None:
    """Seed the named generators with a word of 64 bits."""
    for name in names:
        GENERATORS[name].seed(word)


def states() -> States:
    """Return the state of every generator."""
    return {name: generator.state() for name, generator in GENERATORS.items()}


def moved_since(before: States) -> tuple[str, ...]:
    """Return the names of the generators that have been drawn from, or seeded, since `before`."""
    return tuple(name for name, state in states().items() if state != before[name])


@contextmanager
def isolated(word: int | None = None) -> Iterator[None]:
    """Restore all generators after a block; they are seeded with a word of 64 bits before it if one is given."""
    before = states()
    if word is not None:
        seed_generators(word)
    try:
        yield
    finally:
        for name, state in before.items():
            if GENERATORS[name].state() != state:
                GENERATORS[name].restore(state)
