"""What a model, an algorithm and an executor must offer; the round loop knows nothing else of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, Payload, Profiles


class Model(Protocol):
    """What is trained: a frozen model whose fields are its hyper-parameters."""

    def init_server(self, data: Interactions, seed: int) -> Arrays:
        """The global parameters before round 1."""
        ...

    def init_clients(self, data: Interactions, seed: int) -> Arrays:
        """The private parameters of all clients before round 1, [U, ...] each."""
        ...

    def evaluate(
        self, server: Arrays, clients: Arrays, data: Interactions, split: Literal["validation", "test"]
    ) -> Mapping[str, float]:
        """Metrics over all clients on one held-out split; empty where the split is."""
        ...


@dataclass(frozen=True)
class Broadcast:
    """What the server sends at the start of a round.

    `arrays` is what the clients compute from. `full` is the download of a client that holds nothing; `update` that of
    a client that followed up to the previous round, None where there is nothing smaller than `full`.
    """

    arrays: Arrays
    full: Payload
    update: Payload | None


@dataclass(frozen=True)
class Task:
    """What every client host holds for the whole run, and what an algorithm may look at.

    `training` is the local training's own frozen model; algorithm and training are chosen together.
    """

    data: Interactions
    profiles: Profiles
    model: Model
    training: Any
    seed: int


class Algorithm(Protocol):
    """A federated algorithm: both halves, and no state of its own."""

    @property
    def kind(self) -> str:
        """Its name in the catalog."""
        ...

    def check(self, task: Task) -> None:
        """Raise a `UserError` where algorithm, model and data do not fit together."""
        ...

    def init(self, task: Task) -> Arrays:
        """The server state before round 1."""
        ...

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """What the server sends in this round."""
        ...

    def train(self, broadcast: Arrays, chunk: Chunk, task: Task) -> ChunkResult:
        """The client half: train a chunk of clients and sum up what they send."""
        ...

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays) -> Arrays:
        """The server half: the next state, from the sum over all chunks."""
        ...

    def final(self, server: Arrays) -> Arrays:
        """The global parameters that a server state stands for."""
        ...


class Executor(Protocol):
    """Where chunks are trained; results must not depend on it. Decides nothing about the experiment."""

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """Train all chunks of a round and return their results in the order of the chunks."""
        ...
