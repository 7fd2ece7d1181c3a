"""Taps at the borders between a run's server and its clients, by which a recorder is given what the server sees.

They stand where messages cross: around the executor (broadcast, uploads), around the clients' key store (what they
reveal) and around the opening of the sum. They change nothing that passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from narrowcast.platform.contracts import Executor
from narrowcast.platform.rounds.client_contracts import ClientKeyStore, SecureRounds
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.types import Arrays, Chunk


class Recorder(ABC):
    """Base of what records a real run by three taps.

    Chunks must have one client each: a chunk's partial sum is then what the server decodes of that client's payload.
    """

    def executor(self, inner: Executor) -> Executor:
        """Return an executor that trains as `inner` does, and records."""
        return _ExecutorTap(self, inner)

    def key_store(self, inner: ClientKeyStore) -> ClientKeyStore:
        """Return a key store that answers as `inner` does, and records what it tells the server."""
        return _KeyStoreTap(self, inner)

    def secure_rounds(self, inner: SecureRounds) -> SecureRounds:
        """Return the server's side that opens sums as `inner` does, and records them."""
        return _OpeningTap(self, inner)

    def uploads_crossed(self, broadcast: Arrays, chunks: Sequence[Chunk], results: Sequence[ChunkResult]) -> None:
        """Record a round's broadcast and uploads, if it has clients."""
        if chunks:
            assert all(len(chunk.clients) == 1 for chunk in chunks), "chunks of one client show what each of them sent"
            self.record_uploads(broadcast, chunks, results)

    def sum_crossed(self, results: Sequence[ChunkResult]) -> None:
        """Record the sum that the server opened, if it opened one."""
        if results and any(result.ledger.delivered.any() for result in results):
            self.record_opened(results[0].partial)

    @abstractmethod
    def record_uploads(self, broadcast: Arrays, chunks: Sequence[Chunk], results: Sequence[ChunkResult]) -> None:
        """Record a round's broadcast and uploads, of at least one client."""

    @abstractmethod
    def record_opened(self, total: Arrays) -> None:
        """Record the opened sum of the last round."""

    def record_told(self, method: str, round_index: int, answer: Arrays) -> None:
        """Record the answer of the key store to a call by the server; by default it is not kept."""
        del method, round_index, answer


@dataclass(frozen=True)
class _ExecutorTap(Executor):
    recorder: Recorder
    inner: Executor

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        results = self.inner.train(broadcast, chunks)
        self.recorder.uploads_crossed(broadcast, chunks, results)
        return results


@dataclass(frozen=True)
class _KeyStoreTap:
    recorder: Recorder
    inner: ClientKeyStore

    def call(self, method: str, round_index: int, arrays: Arrays) -> Arrays:
        answer = self.inner.call(method, round_index, arrays)
        self.recorder.record_told(method, round_index, answer)
        return answer


@dataclass(frozen=True)
class _OpeningTap:
    recorder: Recorder
    inner: SecureRounds

    @property
    def answered_round(self) -> int:
        return self.inner.answered_round

    def distribute_keys(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        return self.inner.distribute_keys(chunks)

    def open_sum(self, results: list[ChunkResult]) -> list[ChunkResult]:
        opened = self.inner.open_sum(results)
        self.recorder.sum_crossed(opened)
        return opened

    def next_sum(self, results: list[ChunkResult]) -> Arrays | None:
        return self.inner.next_sum(results)
