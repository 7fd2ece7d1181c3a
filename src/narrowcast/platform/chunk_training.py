"""One chunk trained, wherever that happens, with what can go wrong there said in one line."""

from __future__ import annotations

from narrowcast.platform.contracts import Algorithm, Task
from narrowcast.platform.errors import RunFailed
from narrowcast.platform.types import Arrays, Chunk, ChunkResult

_OUT_OF_MEMORY = ("allocate memory", "out of memory")


def train_chunk(algorithm: Algorithm, broadcast: Arrays, chunk: Chunk, task: Task) -> ChunkResult:
    """Train a chunk, or raise `RunFailed` that names the chunk size where memory does not suffice."""
    try:
        return algorithm.train(broadcast, chunk, task)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in _OUT_OF_MEMORY):
            raise
        raise RunFailed(
            f"round {chunk.round_index}: not enough memory for {len(chunk.clients)} clients at once; "
            "lower chunk_size and start the run again"
        ) from error
