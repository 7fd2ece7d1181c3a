"""Compiled loops of matrix factorisation: the local steps of a client, and the sum of the rows that clients send.

The steps are those of `factorisation.train_rows` and `train_low_rank`, client by client: a client's rows, samples and
shuffles stay in the processor's cache for its whole participation. Each distinct row of a batch is read and written
once, and its gradient counts as often as the row occurs: all copies have the same label, hence the same gradient.
Clients share nothing, so results do not depend on the number of threads.

A work row is (q_i, A_i, B q_i), or q_i alone if whole rows are trained; `vector` is (p, B p), so that the score of a
row, q_i.p + A_i.Bp, is one inner product. The logistic function and its loss are in float32, written so that compiled
loops over a block become vector code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from narrowcast.algorithms.local_training.factorisation_settings import FactorisationSettings
from narrowcast.algorithms.local_training.negatives import ChunkSamples, Places, shuffle
from narrowcast.platform.compiled import compiled, over_clients, read_only
from narrowcast.platform.seeds import Words
from narrowcast.platform.types import BoolArray, FloatArray, IntArray

Floats = NDArray[np.float32]
Exponents = NDArray[np.int32]

_LOWEST = np.float32(-87)  # below, e^x is subnormal
_PER_LOG_2, _HALF, _ONE, _TWO = np.float32(1.44269504), np.float32(0.5), np.float32(1), np.float32(2)
# log 2 in two parts, and e^x on |x| <= log(2) / 2: Cephes' expf (Moshier, 1992).
_LOG_2_HIGH, _LOG_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_E0, _E1, _E2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_E3, _E4, _E5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
# The series of artanh(s) / s in s^2.
_A3, _A5, _A7 = np.float32(1 / 3), np.float32(1 / 5), np.float32(1 / 7)
_A9, _A11, _A13 = np.float32(1 / 9), np.float32(1 / 11), np.float32(1 / 13)


@compiled(inline=True)
def exp_of_minus_abs(scores: Floats, out: Floats, exponents: Exponents) -> None:
    """Compute e^-|z| of each score into `out`; NaN stays NaN. All arrays are [n]; `exponents` is scratch."""
    for index in range(len(scores)):
        x = -abs(scores[index])
        x = _LOWEST if x < _LOWEST else x  # max() might replace NaN
        twos = np.floor(x * _PER_LOG_2 + _HALF)
        exponents[index] = (np.int32(twos) + np.int32(127)) << np.int32(23)
        x = x - twos * _LOG_2_HIGH - twos * _LOG_2_LOW
        series = ((((_E0 * x + _E1) * x + _E2) * x + _E3) * x + _E4) * x + _E5
        out[index] = series * x * x + x + _ONE
    powers = exponents.view(np.float32)
    for index in range(len(scores)):
        out[index] *= powers[index]


@compiled(inline=True)
def sigmoid(scores: Floats, tails: Floats, out: Floats) -> None:
    """Compute 1 / (1 + e^-z) of each score into `out` from `tails`, the values e^-|z|; all arrays are [n]."""
    for index in range(len(scores)):
        numerator = tails[index] if scores[index] < 0 else _ONE
        out[index] = numerator / (_ONE + tails[index])


@compiled(inline=True)
def logistic_loss(scores: Floats, tails: Floats, labels: Floats, out: Floats) -> None:
    """Compute the logistic loss of each score from `tails`, the values e^-|z|; all arrays are [n].

    The loss is log(1 + e^z) for label 0 and log(1 + e^-z) for label 1. log(1 + t) = 2 artanh(t / (2 + t)), and s = t /
    (2 + t) is at most 1/3.
    """
    for index in range(len(scores)):
        s = tails[index] / (_TWO + tails[index])
        q = s * s
        series = (((((_A13 * q + _A11) * q + _A9) * q + _A7) * q + _A5) * q + _A3) * q + _ONE
        z = -scores[index] if labels[index] > 0 else scores[index]
        out[index] = max(z, np.float32(0)) + _TWO * s * series


BLOCK = 128
"""Number of rows scored together, so that the logistic function becomes vector code."""


@compiled(inline=True)
def aligned(n_rows: int, width: int) -> Floats:
    """Return an empty array [n_rows, width or more] whose rows start on cache lines of 16 floats."""
    width = -(-width // 16) * 16
    floats = np.empty(n_rows * width + 16, dtype=np.float32)
    start = -(floats.ctypes.data // 4) % 16
    return floats[start : start + n_rows * width].reshape((n_rows, width))


@compiled(inline=True)
def load_rows(items: IntArray, item_factors: Floats, basis_items: Floats, work: Floats) -> None:
    """Copy q_i and B q_i of a client's rows from the global ones and set A to zero."""
    dimension, rank = item_factors.shape[1], basis_items.shape[1]
    for index in range(len(items)):
        item_row, basis_row, row = item_factors[items[index]], basis_items[items[index]], work[index]
        for column in range(dimension):
            row[column] = item_row[column]
        for component in range(rank):
            row[dimension + component] = 0
            row[dimension + rank + component] = basis_row[component]


@compiled(inline=True)
def leave_changes(items: IntArray, item_factors: Floats, work: Floats, rank: int) -> bool:
    """Write the change of each row, or its A, to the start of its work row; return whether all of them are finite."""
    dimension = item_factors.shape[1]
    finite = True
    for index in range(len(items)):
        item_row, row = item_factors[items[index]], work[index]
        if rank:
            for component in range(rank):
                row[component] = row[dimension + component]
                finite &= np.isfinite(row[component])
        else:
            for column in range(dimension):
                row[column] -= item_row[column]
                finite &= np.isfinite(row[column])
    return finite


@compiled(inline=True)
def distinct_rows(
    batch: Words, mask: np.uint64, sample_rows: Places, positives: int, rows: Places, labels: Floats, copies: Places
) -> int:
    """Collect the distinct rows of a batch with their labels and multiplicities; return the number of distinct rows.

    Shapes: batch [n] words with the index of a sample in the bits of `mask`; rows, labels [n + 1]; copies [rows of the
    client], zero before.
    """
    n_distinct = 0
    for word in batch:
        sample = word & mask
        row = sample_rows[sample]
        rows[n_distinct] = row
        labels[n_distinct] = sample < np.uint64(positives)
        n_distinct += copies[row] == 0
        copies[row] += np.uint32(1)
    return n_distinct


@compiled(reorder=True)
def inner_products(left: Floats, right: Floats) -> Floats:
    """Return L R^T [n, m] of rows [n, d] and [m, d] without the threads of a linear-algebra library."""
    products = np.empty((len(left), len(right)), dtype=np.float32)
    for left_row in range(len(left)):
        for right_row in range(len(right)):
            total = np.float32(0)
            for column in range(left.shape[1]):
                total += left[left_row, column] * right[right_row, column]
            products[left_row, right_row] = total
    return products


@compiled(inline=True, reorder=True)
def project(basis: Floats, vector: Floats) -> None:
    """Write B p into the second part of `vector`, (p, B p)."""
    rank, dimension = basis.shape
    for component in range(rank):
        total = np.float32(0)
        for column in range(dimension):
            total += basis[component, column] * vector[column]
        vector[dimension + component] = total


@compiled(inline=True, reorder=True)
def score_rows(
    work: Floats,
    rows: Places,
    labels: Floats,
    copies: Places,
    vector: Floats,
    gradient: Floats,
    errors: Floats,
    scratch: Floats,
    exponents: Exponents,
    want_loss: bool,
) -> float:
    """Compute the errors sigmoid(z) - y of a block of rows, add its gradient, and return its loss if `want_loss`.

    Shapes: work [rows of the client, width]; rows, labels [n]; vector, gradient [d + r]; errors, exponents [BLOCK] and
    scratch [3, BLOCK] are overwritten. `copies` of these rows are reset to zero.
    """
    n_rows, width = len(rows), len(vector)
    scores, tails, losses = scratch[0, :n_rows], scratch[1, :n_rows], scratch[2, :n_rows]
    for index in range(n_rows):
        row = work[rows[index]]
        score = np.float32(0)
        for column in range(width):
            score += row[column] * vector[column]
        scores[index] = score
    exp_of_minus_abs(scores, tails, exponents)
    sigmoid(scores, tails, errors)
    loss = 0.0
    if want_loss:
        logistic_loss(scores, tails, labels, losses)
        for index in range(n_rows):
            loss += np.float64(losses[index]) * copies[rows[index]]
    weights = losses
    for index in range(n_rows):
        errors[index] -= labels[index]
        weights[index] = errors[index] * np.float32(copies[rows[index]])
        copies[rows[index]] = 0
    for index in range(1, n_rows, 2):  # in pairs, which halves the memory traffic of the gradient
        first_row, second_row = work[rows[index - 1]], work[rows[index]]
        for column in range(width):
            gradient[column] += weights[index - 1] * first_row[column] + weights[index] * second_row[column]
    if n_rows % 2:
        first_row = work[rows[n_rows - 1]]
        for column in range(width):
            gradient[column] += weights[n_rows - 1] * first_row[column]
    return loss


@compiled(inline=True, reorder=True)
def move_rows(
    work: Floats, rows: Places, errors: Floats, vector: Floats, learning_rate: np.float32, decay: np.float32
) -> None:
    """Step q_i -= lr (g p + decay q_i)."""
    pull = learning_rate * decay
    for index in range(len(rows)):
        row = work[rows[index]]
        push = learning_rate * errors[index]
        for column in range(len(vector)):
            row[column] -= push * vector[column] + pull * row[column]


@compiled(inline=True, reorder=True)
def move_components(
    work: Floats,
    rows: Places,
    errors: Floats,
    vector: Floats,
    steps: Floats,
    gram_diagonal: Floats,
    gram: Floats,
    decay: np.float32,
) -> None:
    """Step A_i -= steps (g B p + decay (B q_i + B B^T A_i)); `gram` is empty if B B^T is diagonal, else [r, r]."""
    rank = len(steps)
    dimension = len(vector) - rank
    basis_user = vector[dimension:]
    mixed = np.empty(len(gram), dtype=np.float32)
    for index in range(len(rows)):
        row = work[rows[index]]
        error, components, basis_item = errors[index], row[dimension : dimension + rank], row[dimension + rank :]
        if len(gram):
            for component in range(rank):
                total = np.float32(0)
                for inner in range(rank):
                    total += gram[component, inner] * components[inner]
                mixed[component] = total
            for component in range(rank):
                components[component] -= steps[component] * (
                    error * basis_user[component] + decay * (basis_item[component] + mixed[component])
                )
        else:
            for component in range(rank):
                basis_row = basis_item[component] + gram_diagonal[component] * components[component]
                components[component] -= steps[component] * (error * basis_user[component] + decay * basis_row)


@compiled(inline=True, reorder=True)
def move_user(
    basis: Floats, vector: Floats, gradient: Floats, learning_rate: np.float32, decay: np.float32, n_samples: int
) -> None:
    """Step p -= lr (mean g x + decay p), where x = q + A B and `gradient` is the sum of g (q, A)."""
    rank, dimension = basis.shape
    for component in range(rank):
        for column in range(dimension):
            gradient[column] += gradient[dimension + component] * basis[component, column]
    share = np.float32(1) / np.float32(n_samples)
    for column in range(dimension):
        vector[column] -= learning_rate * (gradient[column] * share + decay * vector[column])


def sum_rows(
    n_rows: int,
    rows: IntArray,
    row_starts: IntArray,
    changes: NDArray[Any],
    weights: NDArray[Any],
    delivered: BoolArray,
    dtype: DTypeLike = np.float32,
) -> tuple[NDArray[Any], FloatArray]:
    """Return the weighted sum of the delivered clients' row changes [N, k] and the number of clients of each row [N].

    Clients are added in their order.

    Shapes: rows [R], without repeats inside a client, whose rows are `row_starts[c]:row_starts[c + 1]`; changes [R, k];
    weights, delivered [C].
    """
    total = np.zeros((n_rows, changes.shape[1]), dtype=dtype)
    touched = np.zeros(n_rows, dtype=np.float64)
    _sum(
        read_only(rows, np.int64),
        read_only(row_starts, np.int64),
        read_only(changes, dtype),
        read_only(weights, weights.dtype),
        read_only(delivered, np.bool_),
        total,
        touched,
    )
    return total, touched


@compiled()
def _sum(
    rows: IntArray,
    row_starts: IntArray,
    changes: Floats,
    weights: Floats,
    delivered: BoolArray,
    total: Floats,
    touched: FloatArray,
) -> None:
    for client in range(len(delivered)):
        if delivered[client]:
            start, stop = row_starts[client], row_starts[client + 1]
            add_rows(rows[start:stop], changes[start:stop], weights[client], total, touched)


@compiled(inline=True)
def add_rows(rows: IntArray, changes: Floats, weight: np.float32, total: Floats, touched: FloatArray) -> None:
    """Add one client's weighted changes [m, k] to the rows of `total` [N, k] and count the client in `touched` [N]."""
    for index in range(len(rows)):
        touched[rows[index]] += 1
        target, change = total[rows[index]], changes[index]
        for column in range(len(target)):
            target[column] += change[column] * weight


@dataclass(frozen=True)
class Subspace:
    """The subspace in which CoLR and SCoLR train the change A B of the item factors.

    It is the basis B, and the components of A that each client trains.

    Shapes: basis [r, d], r = 0 where whole rows are trained; components [C, r], with the clients in the order of the
    samples or batches they are trained on.
    """

    basis: Floats
    components: BoolArray

    @property
    def gradient_scale(self) -> float:
        """Return sqrt(r / d), which scales the gradient of A (Nguyen et al., WWW 2024, section 5.1)."""
        return float((self.basis.shape[0] / self.basis.shape[1]) ** 0.5)


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
    training: FactorisationSettings,
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
    training: FactorisationSettings,
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
            for index in range(len(items)):
                change, row = changes[samples.row_starts[client] + index], work[index]
                for column in range(len(change)):
                    change[column] = row[column]
        elif finite[client] and weights[client] != 0:
            add_rows(items, work, weights[client], total, touched)
