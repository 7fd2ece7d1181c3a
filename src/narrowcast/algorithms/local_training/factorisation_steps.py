"""Compiled steps of one client: the effect of a batch on the item rows and on the user factors.

A work row is (q_i, A_i, B q_i), or q_i alone if whole rows are trained; `vector` is (p, B p), so that the score of a
row, q_i.p + A_i.Bp, is one inner product.
"""

from __future__ import annotations

import numpy as np

from narrowcast.algorithms.local_training.compiled import compiled
from narrowcast.algorithms.local_training.logistic import Exponents, Floats, exp_of_minus_abs, logistic_loss, sigmoid
from narrowcast.algorithms.local_training.streams import Places
from narrowcast.platform.seeds import Words
from narrowcast.platform.types import IntArray

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
    for place in range(len(items)):
        item_row, basis_row, row = item_factors[items[place]], basis_items[items[place]], work[place]
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
    for place in range(len(items)):
        item_row, row = item_factors[items[place]], work[place]
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

    Shapes: batch [n] words with the place of a sample in the bits of `mask`; rows, labels [n + 1]; copies [rows of the
    client], zero before.
    """
    found = 0
    for word in batch:
        place = word & mask
        row = sample_rows[place]
        rows[found] = row
        labels[found] = place < np.uint64(positives)
        found += copies[row] == 0
        copies[row] += np.uint32(1)
    return found


@compiled(reorder=True)
def inner_products(left: Floats, right: Floats) -> Floats:
    """Return L R^T [n, m] of rows [n, d] and [m, d] without the threads of a linear-algebra library."""
    products = np.empty((len(left), len(right)), dtype=np.float32)
    for one in range(len(left)):
        for other in range(len(right)):
            total = np.float32(0)
            for column in range(left.shape[1]):
                total += left[one, column] * right[other, column]
            products[one, other] = total
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
    for place in range(n_rows):
        row = work[rows[place]]
        score = np.float32(0)
        for column in range(width):
            score += row[column] * vector[column]
        scores[place] = score
    exp_of_minus_abs(scores, tails, exponents)
    sigmoid(scores, tails, errors)
    loss = 0.0
    if want_loss:
        logistic_loss(scores, tails, labels, losses)
        for place in range(n_rows):
            loss += np.float64(losses[place]) * copies[rows[place]]
    weights = losses
    for place in range(n_rows):
        errors[place] -= labels[place]
        weights[place] = errors[place] * np.float32(copies[rows[place]])
        copies[rows[place]] = 0
    for place in range(1, n_rows, 2):  # in pairs, which halves the memory traffic of the gradient
        one, other = work[rows[place - 1]], work[rows[place]]
        for column in range(width):
            gradient[column] += weights[place - 1] * one[column] + weights[place] * other[column]
    if n_rows % 2:
        one = work[rows[n_rows - 1]]
        for column in range(width):
            gradient[column] += weights[n_rows - 1] * one[column]
    return loss


@compiled(inline=True, reorder=True)
def move_rows(
    work: Floats, rows: Places, errors: Floats, vector: Floats, learning_rate: np.float32, decay: np.float32
) -> None:
    """Step q_i -= lr (g p + decay q_i)."""
    pull = learning_rate * decay
    for place in range(len(rows)):
        row = work[rows[place]]
        push = learning_rate * errors[place]
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
    for place in range(len(rows)):
        row = work[rows[place]]
        error, components, basis_item = errors[place], row[dimension : dimension + rank], row[dimension + rank :]
        if len(gram):
            for one in range(rank):
                total = np.float32(0)
                for other in range(rank):
                    total += gram[one, other] * components[other]
                mixed[one] = total
            for one in range(rank):
                components[one] -= steps[one] * (error * basis_user[one] + decay * (basis_item[one] + mixed[one]))
        else:
            for one in range(rank):
                basis_row = basis_item[one] + gram_diagonal[one] * components[one]
                components[one] -= steps[one] * (error * basis_user[one] + decay * basis_row)


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
