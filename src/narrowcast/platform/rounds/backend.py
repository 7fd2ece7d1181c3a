"""The contract of a backend: where a whole run is executed.

The backend without a cluster: chunks train one after the other in this process.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from narrowcast.platform.config.files import Section
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.chunks import train_chunks
from narrowcast.platform.rounds.client_contracts import ClientKeyStore, ClientSplit, check_answered
from narrowcast.platform.rounds.evaluation import measure_chunk
from narrowcast.platform.rounds.loop import rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import Run, RunState
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, ClientMeasures


class Backend(Protocol):
    """Executes a run: in this process, or on a cluster that it starts or joins."""

    @property
    def kind(self) -> str:
        """The backend's name in the catalog."""
        ...

    def check(self, run: Run) -> None:
        """Raise `UserError` if the backend or the device is not available, before anything is written."""
        ...

    def run(self, run: Run, state: RunState) -> Generator[Outcome, None, None]:
        """Run the rounds after `state` and yield the outcome of each; clean up when the iterator ends or is closed."""
        ...


class LocalBackend(Section):
    """Execute the whole run in this process."""

    kind: Literal["local"] = "local"

    def check(self, run: Run) -> None:
        """Raise `UserError` if the run asks for a GPU and this machine has none."""
        if run.task.training.device == "cuda" and not torch.cuda.is_available():
            raise UserError("training.device = cuda: this machine has no CUDA device; use cpu, or another machine")

    def run(self, run: Run, state: RunState) -> Generator[Outcome, None, None]:
        """Run the rounds after `state` and yield the outcome of each."""
        if (secure := run.algorithm.secure_sums) is None:
            yield from rounds(run, LocalExecutor(run), state)
            return
        with secure.key_store_process(run.answered) as key_store:
            server = secure.rounds(key_store, run.task)
            check_answered(server, run.answered, state.settled_round)
            yield from rounds(run, LocalExecutor(run, key_store), state, server)


@dataclass(frozen=True)
class LocalExecutor:
    """Trains the chunks of a round one after the other."""

    run: Run
    key_store: ClientKeyStore | None = None

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """Train all chunks and return their results in the order of the chunks."""
        return train_chunks(self.run, broadcast, chunks, self.key_store)

    def measure(
        self, broadcast: Arrays, chunks: Sequence[Chunk], splits: Sequence[ClientSplit]
    ) -> list[ClientMeasures]:
        """Measure the clients of all chunks and return the results in the order of the chunks."""
        return [measure_chunk(self.run, broadcast, chunk, splits) for chunk in chunks]
