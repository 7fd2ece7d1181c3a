"""The common part of trainings of factors: a chunk is one call of compiled loops over observed entries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from narrowcast.algorithms.local_training.factor_task import dense_updates
from narrowcast.algorithms.local_training.factor_updates import Factors, FactorUpdates
from narrowcast.platform.contracts import LocalCall, Task
from narrowcast.platform.section import Section
from narrowcast.platform.types import Arrays, BoolArray, Chunk, IntArray, LocalTerms, LocalUpdates


class FactorTraining(Section, ABC):
    """Training of the factors of a partly observed matrix; a subclass implements `train_factors`."""

    @property
    def device(self) -> str:
        """The device of the compiled loops."""
        return "cpu"

    def mode(self, task: Task) -> Literal["batched", "per_client"]:
        """Return "batched": a chunk is one call of each compiled loop."""
        del task
        return "batched"

    def samples(self, task: Task, clients: IntArray) -> IntArray:
        """Return the training entries of each client, [C]."""
        return np.asarray(task.data.examples[clients])

    def train(self, server: Arrays, chunk: Chunk, task: Task, terms: LocalTerms) -> LocalUpdates:
        """Train all clients of the chunk; `changes` [C, N, K] are zero in rows without entries of the client."""
        return dense_updates(self, server, chunk, task, terms)

    def train_together(self, calls: Sequence[LocalCall]) -> list[LocalUpdates]:
        """Train the calls in turn; each call is already one program of many clients."""
        return [self.train(call.server, call.chunk, call.task, call.terms) for call in calls]

    @abstractmethod
    def train_factors(self, row_factors: Factors, chunk: Chunk, task: Any, moves: BoolArray) -> FactorUpdates:
        """Train H of all clients of a chunk, and W for those that `moves` names, [C]."""
