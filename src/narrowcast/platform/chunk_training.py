"""The training of chunks: one on a client host, or those of several runs as one program."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice

from narrowcast.platform.contracts import LocalCall
from narrowcast.platform.errors import UnresumableFailure
from narrowcast.platform.open_round import TrainingCall
from narrowcast.platform.run import Run
from narrowcast.platform.secure_contracts import ClientKeyStore
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, LocalUpdates

_OUT_OF_MEMORY = ("allocate memory", "out of memory")


def train_chunk(run: Run, broadcast: Arrays, chunk: Chunk, key_store: ClientKeyStore | None = None) -> ChunkResult:
    """Train a chunk, with its clients' secrets if there is a key store.

    Raise `UnresumableFailure` that names the chunk size if the memory does not suffice.
    """
    if key_store is not None:
        secrets = key_store.call("secrets", chunk.round_index, {"clients": chunk.clients})
        chunk = replace(chunk, secrets=secrets)
    with naming_chunk_size(chunk.round_index, len(chunk.clients)):
        began = time.perf_counter()
        result = run.algorithm.train(broadcast, chunk, run.task)
        return replace(result, seconds=time.perf_counter() - began)


@contextmanager
def naming_chunk_size(round_index: int, clients: int) -> Iterator[None]:
    """Raise `UnresumableFailure` that says what to do if the memory does not suffice for this many clients at once."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in _OUT_OF_MEMORY):
            raise
        raise UnresumableFailure(
            f"round {round_index}: not enough memory for {clients} clients at once; "
            "lower chunk_size, or training.batch_size, and start the run again"
        ) from error


@dataclass(frozen=True)
class _ChunkCall:
    """One chunk of one run."""

    run: Run
    broadcast: Arrays
    chunk: Chunk

    def local_calls(self) -> Sequence[LocalCall] | None:
        """Return the local training to do together with other runs, or None if the algorithm trains by itself."""
        return self.run.algorithm.local_calls(self.broadcast, self.chunk, self.run.task)

    def result(self, updates: Sequence[LocalUpdates] | None) -> ChunkResult:
        """Return the result of the chunk from its local training, or train it here if that was not done yet."""
        began = time.perf_counter()
        if updates is None:
            result = self.run.algorithm.train(self.broadcast, self.chunk, self.run.task)
        else:
            result = self.run.algorithm.upload_parts(self.broadcast, self.chunk, self.run.task, updates)
        return replace(result, seconds=time.perf_counter() - began)


def train_together(work: Sequence[tuple[Run, Sequence[TrainingCall]]]) -> list[list[ChunkResult]]:
    """Train the first chunks of all runs as one program, then the second chunks, and so on."""
    chunks = [
        [_ChunkCall(run, call.broadcast, chunk) for call in calls for chunk in call.chunks] for run, calls in work
    ]
    results: list[list[ChunkResult]] = [[] for _ in chunks]
    for index in range(max(map(len, chunks))):
        present = [(place, each[index]) for place, each in enumerate(chunks) if index < len(each)]
        with naming_chunk_size(present[0][1].chunk.round_index, sum(len(each.chunk.clients) for _, each in present)):
            calls = {place: found for place, each in present if (found := each.local_calls()) is not None}
            updates: dict[int, Sequence[LocalUpdates]] = {}
            if every := [call for found in calls.values() for call in found]:
                trained = iter(every[0].task.training.train_together(every))
                updates = {place: list(islice(trained, len(found))) for place, found in calls.items()}
            for place, each in present:
                results[place].append(each.result(updates.get(place)))
    return results
