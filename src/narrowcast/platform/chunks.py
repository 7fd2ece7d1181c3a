"""Division of a cohort into chunks, which belongs to the experiment and not to the backend."""

from __future__ import annotations

import numpy as np

from narrowcast.platform.contracts import LinkAllocation
from narrowcast.platform.population import Population
from narrowcast.platform.types import Chunk, IntArray


def make_chunks(
    cohort: IntArray,
    examples: IntArray,
    chunk_size: int,
    round_index: int,
    population: Population,
    link_allocation: LinkAllocation | None = None,
    epochs: IntArray | None = None,
) -> list[Chunk]:
    """Deal a cohort, clients with most examples first, into equal chunks of at most `chunk_size` clients.

    Shapes: cohort [C] ascending; examples [U], of all clients; epochs [C], the most that each client has time for.
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
        )
        for index in range(n_chunks)
        for part in [_ascending(by_size[index::n_chunks], cohort)]
    ]


def _ascending(places: IntArray, cohort: IntArray) -> IntArray:
    return places[np.argsort(cohort[places])]
