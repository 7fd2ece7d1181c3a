"""The layout of the sum that an algorithm's server needs: which numbers clients add up, and which of them they send.

An algorithm that declares it, by `sum_layout`, can run under secure aggregation, which adds up integers unread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from narrowcast.algorithms.uploads.partial_sums import ROWS, WEIGHT, Aggregation
from narrowcast.platform.contracts import Task
from narrowcast.platform.types import Arrays, BoolArray, IntArray


@dataclass(frozen=True)
class Part:
    """One array of a partial sum, or one column of it; `size` is its number of entries."""

    key: str
    column: int | None
    size: int

    def of(self, arrays: Arrays) -> NDArray[Any]:
        """Return the entries in a partial sum, [size]; a view where the array's memory allows one."""
        values = np.asarray(arrays[self.key])
        return values.reshape(-1) if self.column is None else values[..., self.column].reshape(-1)


@dataclass(frozen=True)
class Group:
    """Entries that a client sends all or none of: signed `values`, and non-negative `counts` that divide them."""

    values: tuple[Part, ...] = ()
    counts: tuple[Part, ...] = ()

    @property
    def n_values(self) -> int:
        """The number of signed entries."""
        return sum(part.size for part in self.values)

    @property
    def n_counts(self) -> int:
        """The number of count entries."""
        return sum(part.size for part in self.counts)


GroupsOfRanks = Callable[[IntArray, IntArray, int, int], BoolArray]
"""(ranks [C], clients [C], seed, round) -> the groups that each client sends, [C, groups]."""


@dataclass(frozen=True)
class SumLayout:
    """The groups of entries of a round's sum, and bounds on what is added up.

    `shapes` maps each array of the algorithm's partial sum to its shape and dtype. `max_clients` and `max_weight` bound
    the number of clients of a round and the sum of their weights. With `one_weight` all counts of a client equal its
    weight, which its values carry as a factor. `rows` is the number of items if counts are by item, 0 otherwise.
    `max_rank` is 0 for updates without a rank; otherwise
    `groups_of_ranks` gives the groups that clients of ranks 0..max_rank send. None: every client sends all groups.
    """

    groups: tuple[Group, ...]
    shapes: dict[str, tuple[tuple[int, ...], DTypeLike]]
    max_weight: int
    max_clients: int
    one_weight: bool = False
    max_rank: int = 0
    groups_of_ranks: GroupsOfRanks | None = None
    rows: int = 0

    def sent_groups(self, ranks: IntArray, clients: IntArray, seed: int, round_index: int) -> BoolArray:
        """Return the groups that each client sends, [C, groups]; public, every party regenerates them from the seed."""
        if self.groups_of_ranks is None:
            return np.ones((len(clients), len(self.groups)), dtype=bool)
        return self.groups_of_ranks(ranks, clients, seed, round_index)

    def zeros(self) -> dict[str, NDArray[Any]]:
        """Return the partial sum over no clients."""
        return {name: np.zeros(shape, dtype=kind) for name, (shape, kind) in self.shapes.items()}


def largest_weight(task: Task, cohort: int) -> int:
    """Return the most training examples that a cohort of this size can have."""
    return int(np.sort(task.data.examples)[-cohort:].sum())


def row_sum_layout(aggregation: Aggregation, columns: int, task: Task, cohort: int) -> SumLayout:
    """Return the layout of a sum of rows [N, columns] of which a client sends all columns or nothing."""
    n_items, weighted = task.data.n_items, aggregation == "weighted"
    divisor = (1, 1) if weighted else (n_items, columns if aggregation == "per_component_mean" else 1)
    return SumLayout(
        groups=(Group((Part(ROWS, None, n_items * columns),), (Part(WEIGHT, None, divisor[0] * divisor[1]),)),),
        shapes={ROWS: ((n_items, columns), np.float32), WEIGHT: (divisor, np.float64)},
        max_weight=largest_weight(task, cohort) if weighted else cohort,
        max_clients=cohort,
        one_weight=weighted,
        rows=0 if weighted else n_items,
    )
