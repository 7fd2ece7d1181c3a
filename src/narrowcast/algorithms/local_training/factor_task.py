"""A chunk's entries as the compiled loops take them, and dense updates of a training of factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from narrowcast.algorithms.local_training.compiled import read_only
from narrowcast.algorithms.local_training.entry_steps import ChunkEntries
from narrowcast.algorithms.local_training.factor_updates import Factors, FactorUpdates, TrainsFactors
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.client_index import ClientIndex
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.masked_factorisation import COLUMN_FACTORS, ROW_FACTORS, MaskedFactorisation
from narrowcast.platform.types import Arrays, BoolArray, Chunk, IntArray, LocalTerms, LocalUpdates


def only_masked_factorisation(kind: str, task: Task) -> None:
    """Raise `UserError` unless the model is a factorisation of a partly observed matrix."""
    if not isinstance(task.model, MaskedFactorisation):
        raise UserError(f"training.kind = {kind} trains masked_factorisation only, not {task.model.kind}; use another")


@dataclass(frozen=True)
class FactorChunk:
    """A chunk's entries, and the rows of W that its clients change: those of the clients that move W.

    Shapes: change_starts [C + 1]; change_rows [R].
    """

    entries: ChunkEntries
    change_starts: IntArray
    change_rows: IntArray

    @classmethod
    def of(cls, row_factors: Factors, chunk: Chunk, task: Task, moves: BoolArray) -> Self:
        """Return the entries of a chunk, less the model's offset and in the type of W; moves [C]."""
        model, data, dtype = task.model, task.data, row_factors.dtype
        assert isinstance(model, MaskedFactorisation)
        held, values = data.of_clients, data.shifted_values(model.offset(data), dtype.name)
        rows, counts = ClientIndex(np.arange(len(held.items)), held.row_starts).rows(chunk.clients[moves])
        changing = np.zeros(len(chunk.clients), dtype=np.int64)
        changing[moves] = counts
        entries = ChunkEntries(
            row_factors=read_only(row_factors, dtype),
            clients=read_only(chunk.clients, np.int64),
            starts=read_only(held.starts, np.int64),
            rows=read_only(held.rows, np.int64),
            columns=read_only(held.columns, np.int64),
            values=read_only(values, dtype),
            row_starts=read_only(held.row_starts, np.int64),
            items=read_only(held.items, np.int64),
        )
        return cls(entries, np.concatenate([[0], np.cumsum(changing)]), held.items[rows])

    def complete_columns(self, place: int) -> Factors:
        """Return the columns of the client at a place, as rows [n, N], of a matrix without missing entries."""
        first, last = self.entries.starts[self.entries.clients[place] :][:2].tolist()
        return self.entries.values[first:last].reshape(-1, len(self.entries.row_factors))

    def no_changes(self) -> Factors:
        """Return zeros [R, K]."""
        w = self.entries.row_factors
        return np.zeros((len(self.change_rows), w.shape[1]), dtype=w.dtype)


def dense_updates(training: TrainsFactors, server: Arrays, chunk: Chunk, task: Task, terms: LocalTerms) -> LocalUpdates:
    """Train all clients of a chunk; return the changes of every row of W [C, N, K]."""
    if terms != LocalTerms():
        raise UserError("training of masked_factorisation takes no terms of an algorithm; use algorithm.kind = fedmavg")
    row_factors = np.asarray(server[ROW_FACTORS])
    updates = training.train_factors(row_factors, chunk, task, np.ones(len(chunk.clients), dtype=bool))
    changes = np.zeros((len(chunk.clients), *row_factors.shape), dtype=row_factors.dtype)
    for place in range(len(chunk.clients)):
        rows, values = updates.of_client(place)
        changes[place, rows] = values
    return local_updates(updates, {ROW_FACTORS: changes})


def local_updates(updates: FactorUpdates, changes: Arrays) -> LocalUpdates:
    """Return what clients learnt, with these changes of W."""
    state = {COLUMN_FACTORS: updates.columns}
    return LocalUpdates(changes, state, updates.loss, updates.examples, updates.steps)
