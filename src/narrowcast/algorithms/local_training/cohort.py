"""The matrix-factorisation clients of a chunk, trained with the program that `training.program` selects."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self

import numpy as np

from narrowcast.algorithms.local_training.batches import ChunkBatches, draw_batches
from narrowcast.algorithms.local_training.device import to_array, to_tensor
from narrowcast.algorithms.local_training.factorisation import LocalResult, train_low_rank, train_rows
from narrowcast.algorithms.local_training.fused import Factors, FusedResult, train_low_rank_fused, train_rows_fused
from narrowcast.algorithms.local_training.logistic import Floats
from narrowcast.algorithms.local_training.row_sum import sum_rows
from narrowcast.algorithms.local_training.streams import ChunkSamples, draw_samples
from narrowcast.algorithms.local_training.subspace import Subspace
from narrowcast.platform.contracts import Task
from narrowcast.platform.models.matrix_factorisation import USER_FACTORS
from narrowcast.platform.types import BoolArray, Chunk, IntArray

if TYPE_CHECKING:
    from narrowcast.algorithms.local_training.factorisation_sgd import FactorisationSGD
    from narrowcast.platform.data.interactions import Interactions


@dataclass(frozen=True)
class RowCohort:
    """A chunk's clients with the samples that they draw in this round.

    Arrays of clients [C] are in the order of the chunk; training results are in that of `samples.order`, and `places`
    maps them back. A client's rows are `rows(place)` of the R rows that the chunk's clients touch.
    """

    chunk: Chunk
    task: Task[Interactions, FactorisationSGD]
    samples: ChunkSamples

    @classmethod
    def draw(cls, chunk: Chunk, task: Task[Interactions, FactorisationSGD]) -> Self:
        """Draw the samples of the chunk's clients."""
        return cls(chunk, task, draw_samples(task, chunk.clients, chunk.round_index))

    @cached_property
    def places(self) -> IntArray:
        """The place of each client in `samples.order`, [C]."""
        places = np.empty(len(self.samples.order), dtype=np.int64)
        places[self.samples.order] = np.arange(len(places))
        return places

    @property
    def n_rows(self) -> IntArray:
        """The number of rows that each client touches, [C]."""
        return np.diff(self.samples.row_starts)[self.places]

    @property
    def positives(self) -> IntArray:
        """The number of training items of each client, [C]."""
        return self.samples.positives[self.places]

    def rows(self, place: int) -> slice:
        """Return the slice of one client's rows among those of the chunk."""
        own = self.places[place]
        return slice(int(self.samples.row_starts[own]), int(self.samples.row_starts[own + 1]))

    def train_rows(self, item_factors: Floats, client_weights: Floats, keep_changes: bool = False) -> FusedResult:
        """Train whole rows of Q [N, d], and add up the changes times `client_weights` [C].

        A client of weight 0 trains for itself alone. `keep_changes` returns the changes of every client too.
        """
        training, weights = self._training, client_weights[self.samples.order]
        start = Factors(item_factors, self._user_factors)
        if training.fused:
            return train_rows_fused(start, self.samples, training, weights, keep_changes=keep_changes)
        items, users = (to_tensor(values, training.device) for values in start)
        batches = self._batches
        return _summed(len(item_factors), batches, train_rows(items, users, batches, training), weights)

    def train_components(
        self,
        item_factors: Floats,
        basis: Floats,
        components: BoolArray,
        client_weights: Floats,
        keep_changes: bool = False,
    ) -> FusedResult:
        """Train each client's components [C, r] of A in Q + A B, and add them up as `train_rows` does."""
        training, weights = self._training, client_weights[self.samples.order]
        start = Factors(item_factors, self._user_factors)
        subspace = Subspace(basis, components[self.samples.order])
        if training.fused:
            return train_low_rank_fused(start, subspace, self.samples, training, weights, keep_changes=keep_changes)
        items, users = (to_tensor(values, training.device) for values in start)
        batches = self._batches
        return _summed(len(item_factors), batches, train_low_rank(items, users, subspace, batches, training), weights)

    @property
    def _training(self) -> FactorisationSGD:
        return self.task.training.at(self.chunk.round_index)

    @property
    def _user_factors(self) -> Floats:
        return np.asarray(self.chunk.state[USER_FACTORS])[self.samples.order]

    @property
    def _batches(self) -> ChunkBatches:
        return draw_batches(self.task, self.chunk.clients, self.chunk.round_index)


def _summed(n_items: int, batches: ChunkBatches, result: LocalResult, client_weights: Floats) -> FusedResult:
    changes, users = to_array(result.row_changes), to_array(result.user_factors)
    client = np.repeat(np.arange(len(users)), np.diff(batches.row_starts))
    bad_rows = np.bincount(client[~np.isfinite(changes).all(axis=1)], minlength=len(users))
    finite = np.isfinite(users).all(axis=1) & (bad_rows == 0)
    delivered = finite & (client_weights != 0)
    total, touched = sum_rows(n_items, batches.row_items, batches.row_starts, changes, client_weights, delivered)
    return FusedResult(total, touched, users, to_array(result.loss).astype(np.float64), finite, changes)
