"""Draws of modules in their forward passes, from streams keyed by private seed, round, client and local step.

A module of anybody's draws from the global generators of torch, NumPy or Python. They are seeded before each step of
each client, so that a client draws the same in any chunk, on any host and in a repeated round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from narrowcast.platform.config.plugins import is_own
from narrowcast.platform.contracts import LocalCall
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.neural_network import NeuralNetwork
from narrowcast.platform.seeds import Words, isolated, moved_since, seed_generators, states, uniform_bits
from narrowcast.platform.types import IntArray

_BEFORE_TRAINING = 2**32
"""Counter at which the draws of passes before the first step begin in a client's stream."""
_PHASE = 2**33
"""Distance of the counters at which the draws of a client's phases begin."""


@dataclass(frozen=True)
class ForwardDraws:
    """The streams of clients, in the order of a schedule, and the generators that are seeded from them.

    Shapes: keys [C]. A module that draws nothing has no generators, and nothing is seeded.
    """

    keys: Words
    generators: tuple[str, ...] = ()
    first: int = 0

    @classmethod
    def of(
        cls, calls: Sequence[LocalCall], order: IntArray, *, phase: int = 0, before_training: bool = False
    ) -> ForwardDraws:
        """Return the draws of the calls' clients in the order of a schedule, of steps or of passes before them."""
        model, data = calls[0].task.model, calls[0].task.data
        generators = model.trial(data).draws if isinstance(model, NeuralNetwork) else ()
        if not generators:
            return NO_DRAWS
        streams = [
            call.task.private_seed.stream_keys("forward", call.chunk.round_index, call.chunk.clients) for call in calls
        ]
        first = phase * _PHASE + (_BEFORE_TRAINING if before_training else 0)
        return cls(np.concatenate(streams)[order], generators, first)

    def seed(self, client: int, step: int) -> None:
        """Seed the generators for a step of the client in this place of the schedule."""
        if self.generators:
            words = uniform_bits(self.keys[client : client + 1], np.array([self.first + step]))
            seed_generators(int(words[0]), self.generators)


NO_DRAWS = ForwardDraws(np.empty(0, dtype=np.uint64))


@contextmanager
def keyed_draws_only(call: LocalCall) -> Iterator[None]:
    """Restore the global generators after a training; raise `UserError` if it drew what no key decides.

    Trainings of which no part is from outside the package draw nothing, and are not watched.
    """
    task, rule = call.task, call.terms.rule
    model = task.model
    if not isinstance(model, NeuralNetwork) or (
        model.all_trained and all(extension is None or is_own(extension) for extension in (model.loss, rule))
    ):
        yield
        return
    if task.training.device == "cuda":
        torch.cuda.init()  # the generators of its devices are then among those that are seeded and watched
    with isolated():
        before = states()
        yield
        if unkeyed := set(moved_since(before)) - set(model.trial(task.data).draws):
            part = "its loss or the algorithm's local step" if model.all_trained else "its loss or some forward passes"
            raise UserError(
                f"{model.named}: {part} draw from {' and '.join(sorted(unkeyed))}, which a trial forward pass did not, "
                "so that no seed decides the result; draw in each forward pass, as dropout does, or not at all"
            )
