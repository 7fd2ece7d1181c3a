"""A synchronous round whose clients are chosen and have not trained yet, and the division of a cohort into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from narrowcast.platform.contracts import Broadcast, LinkAllocation
from narrowcast.platform.population import Population
from narrowcast.platform.run import Run
from narrowcast.platform.types import Arrays, Chunk, FloatArray, IntArray


@dataclass(frozen=True)
class TrainingCall:
    """Chunks that train from the same broadcast."""

    broadcast: Arrays
    chunks: Sequence[Chunk]


@dataclass(frozen=True)
class OpenRound:
    """A synchronous round up to its training: cohort, links, broadcast and chunks.

    Shapes: cohort [C] ascending; downlink_bits [C], the download of each client; download_seconds [C].
    """

    run: Run
    round_index: int
    cohort: IntArray
    link_allocation: LinkAllocation
    broadcast: Broadcast
    downlink_bits: IntArray
    download_seconds: FloatArray
    chunks: Sequence[Chunk] = ()

    @property
    def calls(self) -> list[TrainingCall]:
        """One call: all chunks train from the round's broadcast."""
        return [TrainingCall(self.broadcast.arrays, self.chunks)]

    def upload_bits(self) -> IntArray | None:
        """Return the bits that each client will send if nothing limits it, [C]; None if only the training can tell."""
        return self.run.algorithm.upload_bits(self.broadcast.arrays, self.run.task, self.cohort)

    def seconds_until_done(self, examples: IntArray, uplink_bits: IntArray) -> FloatArray:
        """Return the seconds from the start of the round until each client's upload is in, [C] in cohort order."""
        upload_seconds = uplink_bits / self.link_allocation.uplink_bits_per_second
        run, profiles = self.run, self.run.task.profiles.take(self.cohort)
        work = run.algorithm.relative_work(self.broadcast.arrays, run.task, self.cohort)
        weighed = examples if work is None else examples * work
        return run.plan.clock.client_seconds(profiles, weighed, self.download_seconds, upload_seconds)


def make_chunks(
    cohort: IntArray,
    examples: IntArray,
    chunk_size: int,
    round_index: int,
    population: Population,
    link_allocation: LinkAllocation | None = None,
    epochs: IntArray | None = None,
    draws: IntArray | None = None,
) -> list[Chunk]:
    """Deal a cohort, clients with most examples first, into equal chunks of at most `chunk_size` clients.

    Shapes: cohort [C] ascending; examples [U], of all clients; epochs [C], the most that each client has time for;
    draws [C], how often each was drawn.
    """
    n_chunks = -(-len(cohort) // chunk_size)
    by_size = np.lexsort((cohort, -examples[cohort]))
    budget_bits, lost = (None, None) if link_allocation is None else (link_allocation.budget_bits, link_allocation.lost)
    return [
        Chunk(
            round_index,
            index,
            cohort[part],
            population.take(cohort[part]),
            None if budget_bits is None else budget_bits[part],
            None if lost is None else lost[part],
            None if epochs is None else epochs[part],
            None if draws is None else draws[part],
        )
        for index in range(n_chunks)
        for part in [_ascending(by_size[index::n_chunks], cohort)]
    ]


def _ascending(places: IntArray, cohort: IntArray) -> IntArray:
    return places[np.argsort(cohort[places])]
