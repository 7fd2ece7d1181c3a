"""The interface between CoLR and SCoLR and the two kinds of models whose changes they factorise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from narrowcast.algorithms.federated.sum_layout import SumLayout
from narrowcast.platform.contracts import Broadcast, LocalCall, Task
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, FloatArray, IntArray, LocalUpdates


@dataclass(frozen=True)
class UpdateSizes:
    """The sizes of the updates of a chunk's clients at each rank, by which they choose theirs.

    Shapes: float_bits [C, r + 1], without a codec at rank 0..r; values [C, r], the number of values at rank 1..r;
    head_bits [C], sent beside them; rows [C], the length of a column if all columns of a client have the same,
    otherwise None.
    """

    float_bits: IntArray
    values: FloatArray
    head_bits: FloatArray
    rows: FloatArray | None = None


class LowRankForm(Protocol):
    """Low-rank changes A B of the parameters of one kind of model, for both halves of CoLR and SCoLR."""

    def init(self, model: Arrays) -> Arrays:
        """Return the server state: the model's parameters, and A = 0 of the round before the first."""
        ...

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Return the parameters and the basis of the round; A of the last one for clients that hold the rest."""
        ...

    def train(self, broadcast: Arrays, chunk: Chunk, task: Task) -> ChunkResult:
        """Train a chunk's clients on the components that they chose, and send these."""
        ...

    def local_call(self, broadcast: Arrays, chunk: Chunk, task: Task) -> LocalCall | None:
        """Return the local training that `train` begins with; None if it has a program of its own."""
        ...

    def upload(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> ChunkResult:
        """Send what the clients trained: the rest of `train`."""
        ...

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays) -> Arrays:
        """Return the next server state: the mean of A over the clients, and the parameters moved by A B."""
        ...

    def final(self, server: Arrays) -> Arrays:
        """Return the model's parameters."""
        ...

    def sum_layout(self, task: Task, cohort: int) -> SumLayout:
        """Return the layout of the sum of A."""
        ...
