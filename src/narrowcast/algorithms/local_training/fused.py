"""Local SGD of matrix factorisation, client by client in compiled loops: what `train_rows` and `train_low_rank` do.

A client's rows, samples and shuffles stay in the processor's cache for its whole participation. Each distinct row of a
batch is read and written once, its gradient counted as often as the row occurs: all copies have the same label, and so
the same gradient. Clients share nothing, so results do not depend on the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from narrowcast.algorithms.local_training.compiled import compiled, frozen, over_clients
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
from narrowcast.platform.types import BoolArray, FloatArray, IntArray

if TYPE_CHECKING:
    from narrowcast.algorithms.local_training.factorisation_sgd import FactorisationSGD


@dataclass(frozen=True)
class FusedResult:
    """What local training changed, summed up; the client axis is in the order of `ChunkSamples.order`.

    Shapes:
        total: [N, d] or [N, r]; the changes of the clients whose results are finite, each times its client's factor.
        touched: [N] how many of these clients touched each row.
        user_factors: [C, d]; loss: [C], the mean over the last epoch; finite: [C].
        row_changes: [R, d] or [R, r], the rows of `ChunkSamples.row_items`, where they were to be kept.
    """

    total: Floats
    touched: FloatArray
    user_factors: Floats
    loss: FloatArray
    finite: BoolArray
    row_changes: Floats | None


def train_rows_fused(
    item_factors: Floats,
    user_factors: Floats,
    samples: ChunkSamples,
    training: FactorisationSGD,
    factors: Floats,
    threads: int = 1,
    keep_changes: bool = False,
) -> FusedResult:
    """Train whole item rows: q_i -= lr (g p + 2 wd q_i) per row, p -= lr (mean g x + 2 wd p).

    Shapes: item_factors [N, d]; user_factors [C, d] and factors [C] in the order of `samples.order`. A client whose
    factor is 0 trains for itself: it is neither summed nor counted.
    """
    n_clients, dimension = user_factors.shape
    basis, steps = np.empty((0, dimension), dtype=np.float32), np.empty((n_clients, 0))
    return _train(item_factors, user_factors, basis, steps, samples, training, factors, threads, keep_changes)


def train_low_rank_fused(
    item_factors: Floats,
    user_factors: Floats,
    basis: Floats,
    components: BoolArray,
    gradient_scale: float,
    samples: ChunkSamples,
    training: FactorisationSGD,
    factors: Floats,
    threads: int = 1,
    keep_changes: bool = False,
) -> FusedResult:
    """Train A with x_i = q_i + A_i B, q_i and B frozen: A_i -= lr s (g B p + 2 wd B x_i) on the client's components.

    Shapes: as for whole rows; components [C, r] in the order of `samples.order`; basis [r, d]. A starts at zero, so
    the change of a row is its A.
    """
    steps = np.where(components, gradient_scale * training.learning_rate, 0.0)
    return _train(item_factors, user_factors, basis, steps, samples, training, factors, threads, keep_changes)


def _train(
    item_factors: Floats,
    user_factors: Floats,
    basis: Floats,
    steps: FloatArray,
    samples: ChunkSamples,
    training: FactorisationSGD,
    factors: Floats,
    threads: int,
    keep_changes: bool,
) -> FusedResult:
    """Train whole rows where the basis has none, the components of A otherwise; steps [C, r] scale its gradients.

    One thread adds up the changes client by client while they are in its cache; with more they are kept, and added up
    in the same order afterwards.
    """
    n_items, dimension = item_factors.shape
    n_clients, width = len(samples.order), len(basis) or dimension
    keep = keep_changes or threads > 1
    item_factors, basis, factors = (frozen(array, np.float32) for array in (item_factors, basis, factors))
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
        frozen(user_factors, np.float32),
        basis,
        inner_products(item_factors, basis),
        frozen(diagonal, np.float32),
        frozen(gram if mixes else gram[:0], np.float32),
        frozen(steps, np.float32),
        samples,
        training.batch_size,
        training.epochs,
        np.float32(training.learning_rate),
        np.float32(2 * training.weight_decay),
        factors,
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
        delivered = finite & (factors != 0)
        total, touched = sum_rows(n_items, samples.row_items, samples.row_starts, changes, factors, delivered)
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
    factors: Floats,
    keep: bool,
    changes: Floats,
    total: Floats,
    touched: FloatArray,
    users: Floats,
    loss: FloatArray,
    finite: BoolArray,
    clients: IntArray,
) -> None:
    """Train these clients one after the other; the arrays from `changes` on are written."""
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
                        move_components(work, rows, errors, vector, steps[client], gram_diagonal, gram, decay)
                    else:
                        move_rows(work, rows, errors, vector, learning_rate, decay)
                move_user(basis, vector, gradient, learning_rate, decay, len(batch))
        users[client] = vector[:dimension]
        loss[client] = total_loss / max(n_samples, 1)
        finite[client] = leave_changes(items, item_factors, work, rank) and np.isfinite(users[client]).all()
        if keep:
            for place in range(len(items)):
                change, row = changes[samples.row_starts[client] + place], work[place]
                for column in range(len(change)):
                    change[column] = row[column]
        elif finite[client] and factors[client] != 0:
            add_rows(items, work, factors[client], total, touched)
