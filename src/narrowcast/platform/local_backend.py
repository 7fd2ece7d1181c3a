"""The backend without a cluster: chunks one after the other in this process."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict

from narrowcast.platform.chunk_training import train_chunk
from narrowcast.platform.contracts import Algorithm, ClientKeyStore, KeepsSecrets, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.plan import Plan
from narrowcast.platform.play import play
from narrowcast.platform.rounds import Outcome
from narrowcast.platform.state import RunState
from narrowcast.platform.types import Arrays, Chunk, ChunkResult


class LocalBackend(BaseModel):
    """Play the whole run in this process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["local"] = "local"

    def check(self, plan: Plan, task: Task) -> None:  # noqa: ARG002 - it is the cluster that has to fit
        """The process is there; a GPU may be missing."""
        if task.training.device == "cuda" and not torch.cuda.is_available():
            raise UserError("training.device = cuda: this machine has no CUDA device; use cpu, or another machine")

    def run(self, plan: Plan, algorithm: Algorithm, task: Task, state: RunState) -> Generator[Outcome, None, None]:
        """Play the rounds that `state` has not seen."""
        if not isinstance(algorithm, KeepsSecrets):
            yield from play(plan, algorithm, task, LocalExecutor(algorithm, task), state)
            return
        with algorithm.key_store_process() as key_store:
            executor = algorithm.over(LocalExecutor(algorithm, task, key_store), key_store, task)
            yield from play(plan, algorithm, task, executor, state)


@dataclass(frozen=True)
class LocalExecutor:
    """Trains the chunks of a round one after the other."""

    algorithm: Algorithm
    task: Task
    key_store: ClientKeyStore | None = None

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """Train all chunks of a round and return their results in the order of the chunks."""
        return [train_chunk(self.algorithm, broadcast, chunk, self.task, self.key_store) for chunk in chunks]
