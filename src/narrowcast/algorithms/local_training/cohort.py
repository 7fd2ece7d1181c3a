"""Training of a chunk of matrix-factorisation clients with the program that `training.program` selects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from narrowcast.algorithms.local_training.batches import ChunkBatches, draw_batches
from narrowcast.algorithms.local_training.device import to_array, to_tensor
from narrowcast.algorithms.local_training.factorisation import LocalResult, train_low_rank, train_rows
from narrowcast.algorithms.local_training.fused import Factors, FusedResult, train_low_rank_fused, train_rows_fused
from narrowcast.algorithms.local_training.logistic import Floats
from narrowcast.algorithms.local_training.row_sum import sum_rows
from narrowcast.algorithms.local_training.streams import ChunkSamples
from narrowcast.algorithms.local_training.subspace import Subspace
from narrowcast.platform.contracts import Task
from narrowcast.platform.models.matrix_factorisation import USER_FACTORS
from narrowcast.platform.types import Chunk

if TYPE_CHECKING:
    from narrowcast.algorithms.local_training.factorisation_sgd import FactorisationSGD
    from narrowcast.platform.data.interactions import Interactions


def train_cohort_rows(
    item_factors: Floats,
    chunk: Chunk,
    task: Task[Interactions, FactorisationSGD],
    samples: ChunkSamples,
    weights: Floats,
    keep_changes: bool = False,
) -> FusedResult:
    """Train whole rows of Q and sum their changes, weighted.

    Shapes: item_factors [N, d]; weights [C] in the order of `samples.order`.
    """
    user_factors = np.asarray(chunk.state[USER_FACTORS])[samples.order]
    if task.training.fused:
        start = Factors(item_factors, user_factors)
        return train_rows_fused(start, samples, task.training, weights, keep_changes=keep_changes)
    batches = draw_batches(task.data, chunk.clients, task.training, task.seed, chunk.round_index)
    device = task.training.device
    result = train_rows(to_tensor(item_factors, device), to_tensor(user_factors, device), batches, task.training)
    return _summed(len(item_factors), batches, result, weights)


def train_cohort_components(
    item_factors: Floats,
    subspace: Subspace,
    chunk: Chunk,
    task: Task[Interactions, FactorisationSGD],
    samples: ChunkSamples,
    weights: Floats,
    keep_changes: bool = False,
) -> FusedResult:
    """Train each client's components of A and sum them, weighted; shapes as in `train_cohort_rows`."""
    user_factors = np.asarray(chunk.state[USER_FACTORS])[samples.order]
    if task.training.fused:
        start = Factors(item_factors, user_factors)
        return train_low_rank_fused(start, subspace, samples, task.training, weights, keep_changes=keep_changes)
    batches = draw_batches(task.data, chunk.clients, task.training, task.seed, chunk.round_index)
    start_items, start_users = (to_tensor(values, task.training.device) for values in (item_factors, user_factors))
    result = train_low_rank(start_items, start_users, subspace, batches, task.training)
    return _summed(len(item_factors), batches, result, weights)


def _summed(n_items: int, batches: ChunkBatches, result: LocalResult, weights: Floats) -> FusedResult:
    changes, users = to_array(result.row_changes), to_array(result.user_factors)
    client = np.repeat(np.arange(len(users)), np.diff(batches.row_starts))
    bad_rows = np.bincount(client[~np.isfinite(changes).all(axis=1)], minlength=len(users))
    finite = np.isfinite(users).all(axis=1) & (bad_rows == 0)
    delivered = finite & (weights != 0)
    total, touched = sum_rows(n_items, batches.row_items, batches.row_starts, changes, weights, delivered)
    return FusedResult(total, touched, users, to_array(result.loss).astype(np.float64), finite, changes)
