"""The actor that hosts clients."""

from __future__ import annotations

from typing import Any

import ray

from narrowcast.cluster.key_service import RemoteVault
from narrowcast.platform.chunk_training import train_chunk
from narrowcast.platform.contracts import Algorithm, Task
from narrowcast.platform.threads import one_thread
from narrowcast.platform.types import Arrays, Chunk, ChunkResult


@ray.remote
class ClientHost:
    """Hosts clients: their data and profiles lie in the object store, their state travels with each call.

    A host keeps nothing between rounds, so a killed one is replaced without losing what its clients learnt.
    """

    def __init__(self, algorithm: Algorithm, task: Task, key_store: Any) -> None:
        self._algorithm = algorithm
        self._task = task
        self._vault = None if key_store is None else RemoteVault(key_store)

    def ready(self) -> bool:
        """Answer once the host can train."""
        return True

    def train(self, broadcast: Arrays, chunks: list[Chunk]) -> list[ChunkResult]:
        """Train some of a round's chunks."""
        with one_thread():
            return [train_chunk(self._algorithm, broadcast, chunk, self._task, self._vault) for chunk in chunks]
