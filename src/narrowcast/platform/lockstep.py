"""The training of several runs as one program where their shapes allow; the results of a run are those it has alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from narrowcast.platform.chunk_training import naming_chunk_size
from narrowcast.platform.contracts import LocalCall
from narrowcast.platform.open_round import TrainingCall
from narrowcast.platform.run import Run
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, LocalUpdates


@dataclass(frozen=True)
class _ChunkCall:
    """One chunk of one run."""

    run: Run
    broadcast: Arrays
    chunk: Chunk

    def local_call(self) -> LocalCall | None:
        """Return the local training to do together with other runs, or None if the algorithm trains by itself."""
        return self.run.algorithm.local_call(self.broadcast, self.chunk, self.run.task)

    def result(self, updates: LocalUpdates | None) -> ChunkResult:
        """Return the result of the chunk from its local training, or train it here if that was not done yet."""
        began = time.perf_counter()
        if updates is None:
            result = self.run.algorithm.train(self.broadcast, self.chunk, self.run.task)
        else:
            result = self.run.algorithm.upload(self.broadcast, self.chunk, self.run.task, updates)
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
            calls = {place: call for place, each in present if (call := each.local_call()) is not None}
            updates: dict[int, LocalUpdates] = {}
            if calls:
                training = next(iter(calls.values())).task.training
                updates = dict(zip(calls, training.train_together(list(calls.values())), strict=True))
            for place, each in present:
                results[place].append(each.result(updates.get(place)))
    return results
