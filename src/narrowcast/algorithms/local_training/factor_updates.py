"""The result of a chunk's local training of a partly observed matrix: changes of W by row, and the clients' H."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.contracts import Task
from narrowcast.platform.types import BoolArray, Chunk, FloatArray, IntArray

Factors = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class FactorUpdates:
    """Changes of W for clients that move it, in the rows of their training entries, and the new H of all clients.

    Shapes: row_starts [C + 1], of each client's rows; rows [R] and changes [R, K]; columns [C, n, K], the new H;
    loss [C], the mean squared error of the training entries before W moves; examples, steps and finite [C].
    """

    row_starts: IntArray
    rows: IntArray
    changes: Factors
    columns: Factors
    loss: FloatArray
    examples: IntArray
    steps: IntArray
    finite: BoolArray

    def of_client(self, place: int) -> tuple[IntArray, Factors]:
        """Return the rows of one client and their changes."""
        own = slice(int(self.row_starts[place]), int(self.row_starts[place + 1]))
        return self.rows[own], self.changes[own]


class TrainsFactors(Protocol):
    """A `Training` of W and H by observed entries."""

    def train_factors(self, row_factors: Factors, chunk: Chunk, task: Task, moves: BoolArray) -> FactorUpdates:
        """Train H of all clients of a chunk, and W for those that `moves` names, [C]."""
        ...


def finite_updates(row_starts: IntArray, changes: Factors, columns: Factors, loss: FloatArray) -> BoolArray:
    """Return the clients whose factors stayed finite, [C]."""
    finite = np.isfinite(loss) & np.isfinite(columns).all(axis=(1, 2))
    wrong = ~np.isfinite(changes).all(axis=1)
    if wrong.any():
        clients = np.repeat(np.arange(len(finite)), np.diff(row_starts))
        finite &= np.bincount(clients[wrong], minlength=len(finite)) == 0
    return finite
