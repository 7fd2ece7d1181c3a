"""Private state of all clients between rounds: rows of large arrays, of which a round touches those of its cohort."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from narrowcast.platform.types import Arrays, IntArray

SHARE_OF_MEMORY = 0.5
"""Share of the free memory above which zeros are kept in sparse temporary files, which may outgrow the memory."""


@dataclass
class Population:
    """The private state of all clients, changed in place, row by row.

    Shapes: arrays [U, ...] each; last_round [U], the last round in which a client took part, 0 for none.
    """

    arrays: dict[str, NDArray[Any]]
    last_round: IntArray

    @classmethod
    def fresh(cls, initial: Arrays, n_clients: int) -> Population:
        """Return the state before round 1, in which no client has taken part; `initial` is not written to."""
        zeros = sum(values.nbytes for values in initial.values() if _is_zero(values))
        in_files = zeros > SHARE_OF_MEMORY * psutil.virtual_memory().available
        arrays = {name: _own(values, in_files) for name, values in initial.items()}
        return cls(arrays, np.zeros(n_clients, dtype=np.int64))

    def take(self, clients: IntArray) -> Arrays:
        """Return a copy of the rows of `clients`."""
        return {name: values[clients] for name, values in self.arrays.items()}

    def put(self, clients: IntArray, state: Arrays) -> None:
        """Replace the rows of `clients`."""
        for name, values in state.items():
            self.arrays[name][clients] = values

    def participants(self) -> IntArray:
        """Return the clients that have taken part so far; all others have their initial state."""
        return np.flatnonzero(self.last_round)


def _is_zero(values: NDArray[Any]) -> bool:
    """Return whether the array is a broadcast zero."""
    return bool(values.size and not any(values.strides) and not values.flat[0])


def _own(values: NDArray[Any], in_file: bool) -> NDArray[Any]:
    """Return a writable copy; of a broadcast zero only touched rows take memory, or space in a file."""
    if not _is_zero(values):
        return values.copy()
    if not in_file:
        return np.zeros(values.shape, dtype=values.dtype)
    with tempfile.TemporaryFile(prefix="narrowcast-clients-") as file:
        file.truncate(values.nbytes)
        return np.memmap(file, dtype=values.dtype, mode="r+", shape=values.shape)
