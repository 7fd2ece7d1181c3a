"""The training of one chunk on a client host, with errors of one line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from narrowcast.platform.contracts import ClientKeyStore
from narrowcast.platform.errors import RunFailed
from narrowcast.platform.run import Run
from narrowcast.platform.types import Arrays, Chunk, ChunkResult

_OUT_OF_MEMORY = ("allocate memory", "out of memory")


def train_chunk(run: Run, broadcast: Arrays, chunk: Chunk, key_store: ClientKeyStore | None = None) -> ChunkResult:
    """Train a chunk, with its clients' secrets if there is a key store.

    Raise `RunFailed` that names the chunk size if the memory does not suffice.
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
    """Raise `RunFailed` that says what to do if the memory does not suffice for this many clients at once."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in _OUT_OF_MEMORY):
            raise
        raise RunFailed(
            f"round {round_index}: not enough memory for {clients} clients at once; "
            "lower chunk_size and start the run again"
        ) from error
