"""The actor that hosts clients."""

from __future__ import annotations

from typing import Any

import ray

from narrowcast.cluster.key_service import RemoteKeyStore
from narrowcast.platform.chunk_training import train_chunks
from narrowcast.platform.client_contracts import ClientSplit
from narrowcast.platform.client_metrics import measure_chunk
from narrowcast.platform.run import Run
from narrowcast.platform.threads import one_thread
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, ClientMeasures


@ray.remote
class ClientHost:
    """Trains chunks of clients; their data and profiles are in the object store, their state comes with each call.

    A host keeps nothing between rounds, so that a killed one is replaced without losing the state of its clients.
    """

    def __init__(self, run: Run, key_store: Any) -> None:
        self._run = run
        self._key_store = None if key_store is None else RemoteKeyStore(key_store)

    def ready(self) -> bool:
        """Return True once the host can train."""
        return True

    def train(self, broadcast: Arrays, chunks: list[Chunk]) -> list[ChunkResult]:
        """Train some of a round's chunks, one after the other."""
        with one_thread():
            return train_chunks(self._run, broadcast, chunks, self._key_store)

    def measure(self, broadcast: Arrays, chunks: list[Chunk], splits: list[ClientSplit]) -> list[ClientMeasures]:
        """Measure the clients of some chunks, one chunk after the other."""
        with one_thread():
            return [measure_chunk(self._run, broadcast, chunk, splits) for chunk in chunks]
