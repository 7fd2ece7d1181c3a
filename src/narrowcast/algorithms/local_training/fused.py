"""Local SGD of matrix factorisation in compiled loops, client by client.

The steps are those of `train_rows` and `train_low_rank`. A client's rows, samples and shuffles stay in the processor's
cache for its whole participation. Each distinct row of a batch is read and written once, and its gradient counts as
often as the row occurs: all copies have the same label, hence the same gradient. Clients share nothing, so results do
not depend on the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from narrowcast.algorithms.local_training.compiled import compiled, over_clients, read_only
from narrowcast.algorithms.local_training.factorisation_steps import (
    BLOCK,
    aligned,
    distinct_rows,
    inner_products,
    leave_changes,
    load_rows,
    move_components,
    move_rows,
    move_user,
    project,
    score_rows,
)
from narrowcast.algorithms.local_training.logistic import Floats
from narrowcast.algorithms.local_training.row_sum import add_rows, sum_rows
from narrowcast.algorithms.local_training.streams import ChunkSamples, shuffle
from narrowcast.algorithms.local_training.subspace import Subspace
from narrowcast.platform.types import BoolArray, FloatArray, IntArray

if TYPE_CHECKING:
    from narrowcast.algorithms.local_training.factorisation_sgd import FactorisationSGD


class Factors(NamedTuple):
    """The factors from which training starts. Shapes: item [N, d]; user [C, d] in the order of `ChunkSamples.order`."""

    item: Floats
    user: Floats


@dataclass(frozen=True)
class FusedResult:
    """Result of local training, summed over clients; the client axis is in the order of `ChunkSamples.order`.

    Shapes:
        total: [N, d] or [N, r] sum of weight times change over the clients whose result is finite.
        touched: [N] number of these clients that touched each row.
        user_factors: [C, d]; loss: [C], the mean over the last epoch; finite: [C].
        row_changes: [R, d] or [R, r] changes of the rows of `ChunkSamples.row_items`; None unless `keep_changes`.
    """

    total: Floats
    touched: FloatArray
    user_factors: Floats
    loss: FloatArray
    finite: BoolArray
    row_changes: Floats | None


def train_rows_fused(
    start: Factors,
    samples: ChunkSamples,
    training: FactorisationSGD,
    weights: Floats,
    threads: int = 1,
    keep_changes: bool = False,
) -> FusedResult:
    """Train whole item rows: q_i -= lr (g p + 2 wd_q q_i) per row, p -= lr (mean g x + 2 wd p).

    Shapes: weights [C] in the order of `samples.order`. A client of weight 0 trains, but is neither summed nor counted.
    """
    n_clients, dimension = start.user.shape
    whole = Subspace(np.empty((0, dimension), dtype=np.float32), np.empty((n_clients, 0), dtype=np.bool_))
    return train_low_rank_fused(start, whole, samples, training, weights, threads, keep_changes)


def train_low_rank_fused(
    start: Factors,
    subspace: Subspace,
    samples: ChunkSamples,
    training: FactorisationSGD,
    weights: Floats,
    threads: int = 1,
    keep_changes: bool = False,
) -> FusedResult:
    """Train A with x_i = q_i + A_i B, q_i and B fixed: A_i -= lr s (g B p + 2 wd_q B x_i) on the client's components.

    A starts at zero, so the change of a row is its A. A basis without rows trains whole rows. One thread adds up the
    changes client by client while they are in its cache; several threads keep them, and they are added up afterwards
    in the same order.

    Shapes: weights [C] in the order of `samples.order`, as in `train_rows_fused`.
    """
    item_factors, basis, weights = (read_only(array, np.float32) for array in (start.item, subspace.basis, weights))
    steps = np.where(subspace.components, subspace.gradient_scale * training.learning_rate, 0.0)
    n_items, dimension = item_factors.shape
    n_clients, width = len(samples.order), len(basis) or dimension
    keep = keep_changes or threads > 1
    gram = inner_products(basis, basis)
    diagonal = np.diagonal(gram)
    mixes = bool((abs(gram - np.diag(diagonal)) > 1e-6 * diagonal.min(initial=1)).any())
    changes = np.empty((len(samples.row_items) if keep else 0, width), dtype=np.float32)
    total, touched = np.zeros((n_items, width), dtype=np.float32), np.zeros(n_items)
    users = np.empty((n_clients, dimension), dtype=np.float32)
    loss, finite = np.empty(n_clients), np.empty(n_clients, dtype=np.bool_)
    train = partial(
        _train_clients,
        item_factors,
        read_only(start.user, np.float32),
        basis,
        inner_products(item_factors, basis),
        read_only(diagonal, np.float32),
        read_only(gram if mixes else gram[:0], np.float32),
        read_only(steps, np.float32),
        samples,
        training.step_samples(samples.samples),
        training.epochs,
        np.float32(training.learning_rate),
        np.float32(2 * training.weight_decay),
        np.float32(2 * training.item_decay),
        weights,
        keep,
        changes,
        total,
        touched,
        users,
        loss,
        finite,
    )
    over_clients(train, samples.samples, threads)
    if keep:
        delivered = finite & (weights != 0)
        total, touched = sum_rows(n_items, samples.row_items, samples.row_starts, changes, weights, delivered)
    return FusedResult(total, touched, users, loss, finite, changes if keep_changes else None)


@compiled(reorder=True)
def _train_clients(
    item_factors: Floats,
    user_factors: Floats,
    basis: Floats,
    basis_items: Floats,
    gram_diagonal: Floats,
    gram: Floats,
    steps: Floats,
    samples: ChunkSamples,
    batch_size: int,
    epochs: int,
    learning_rate: np.float32,
    decay: np.float32,
    item_decay: np.float32,
    weights: Floats,
    keep: bool,
    changes: Floats,
    total: Floats,
    touched: FloatArray,
    users: Floats,
    loss: FloatArray,
    finite: BoolArray,
    clients: IntArray,
) -> None:
    """Train these clients in turn; the arrays from `changes` on are overwritten."""
    rank, dimension = basis.shape
    most_samples = samples.samples[clients].max()
    most_rows = np.diff(samples.row_starts)[clients].max()
    words, shuffled = np.empty(most_samples, dtype=np.uint64), np.empty(most_samples, dtype=np.uint64)
    heads = np.empty(2 * most_samples + 2, dtype=np.uint32)
    work = aligned(most_rows, dimension + 2 * rank)
    copies = np.zeros(most_rows, dtype=np.uint32)
    batch_rows = np.empty(min(batch_size, most_samples) + 1, dtype=np.uint32)
    labels, errors = np.empty(len(batch_rows), dtype=np.float32), np.empty(BLOCK, dtype=np.float32)
    width = dimension + rank
    vector, gradient = aligned(1, width)[0, :width], aligned(1, width)[0, :width]
    scratch, exponents = np.empty((3, BLOCK), dtype=np.float32), np.empty(BLOCK, dtype=np.int32)
    for client in clients:
        n_samples = samples.samples[client]
        items = samples.row_items[samples.row_starts[client] : samples.row_starts[client + 1]]
        sample_rows = samples.sample_rows[samples.sample_starts[client] :]
        load_rows(items, item_factors, basis_items, work)
        vector[:dimension] = user_factors[client]
        total_loss = 0.0
        for epoch in range(epochs):
            last = epoch == epochs - 1
            mask = shuffle(samples.shuffle_keys[client], epoch, n_samples, words, shuffled, heads)
            for start in range(0, n_samples, batch_size):
                batch = shuffled[start : min(start + batch_size, n_samples)]
                n_rows = distinct_rows(batch, mask, sample_rows, samples.positives[client], batch_rows, labels, copies)
                project(basis, vector)
                gradient[:] = 0
                for block in range(0, n_rows, BLOCK):
                    rows = batch_rows[block : min(block + BLOCK, n_rows)]
                    total_loss += score_rows(
                        work, rows, labels[block:], copies, vector, gradient, errors, scratch, exponents, last
                    )
                    if rank:
                        move_components(work, rows, errors, vector, steps[client], gram_diagonal, gram, item_decay)
                    else:
                        move_rows(work, rows, errors, vector, learning_rate, item_decay)
                move_user(basis, vector, gradient, learning_rate, decay, len(batch))
        users[client] = vector[:dimension]
        loss[client] = total_loss / max(n_samples, 1)
        finite[client] = leave_changes(items, item_factors, work, rank) and np.isfinite(users[client]).all()
        if keep:
            for place in range(len(items)):
                change, row = changes[samples.row_starts[client] + place], work[place]
                for column in range(len(change)):
                    change[column] = row[column]
        elif finite[client] and weights[client] != 0:
            add_rows(items, work, weights[client], total, touched)
