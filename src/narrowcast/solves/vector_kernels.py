"""Compiled products and sweeps over the vectors of a graph's vertices.

Shapes: indptr [n + 1] int64, indices [2 m] int32, weights [2 m] float64, vectors [n, k] float64, rows of unit norm.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from narrowcast.platform.compiled import compiled


@compiled(reorder=True)
def weighted_sums(indptr: Any, indices: Any, weights: Any, vectors: Any) -> Any:
    """Return g_i = sum_j w_ij v_j of every vertex [n, k]."""
    sums = np.zeros(vectors.shape)
    for i in range(vectors.shape[0]):
        for e in range(indptr[i], indptr[i + 1]):
            j, weight = indices[e], weights[e]
            for c in range(vectors.shape[1]):
                sums[i, c] += weight * vectors[j, c]
    return sums


@compiled()
def cut_values(indptr: Any, indices: Any, weights: Any, signs: Any) -> Any:
    """Return the weight that each of some cuts separates [cuts]; signs [n, cuts] are 0 or 1."""
    cuts = np.zeros(signs.shape[1])
    for i in range(signs.shape[0]):
        for e in range(indptr[i], indptr[i + 1]):
            j, weight = indices[e], weights[e]
            if j < i:
                for c in range(signs.shape[1]):
                    cuts[c] += weight * (signs[i, c] ^ signs[j, c])
    return cuts


@compiled(inline=True)
def _turned(sums: Any, vectors: Any, i: int, momentum: float, old: Any) -> Any:
    """Set v_i to -(g / |g| + momentum v_i), normalised; return |g| and |g / |g| + v_i| of before.

    `sums` is g [k], and `old` memory for the previous v_i. A vertex whose g is zero keeps its vector.
    """
    norm, product = 0.0, 0.0
    for c in range(vectors.shape[1]):
        norm += sums[c] * sums[c]
        product += sums[c] * vectors[i, c]
    norm = np.sqrt(norm)
    if norm == 0.0:
        return 0.0, 0.0
    length = np.sqrt(max(0.0, 1.0 + momentum * momentum + 2.0 * momentum * product / norm))
    if length == 0.0:
        return norm, 0.0
    distance = 0.0
    for c in range(vectors.shape[1]):
        old[c] = vectors[i, c]
        unit = sums[c] / norm
        distance += (unit + old[c]) ** 2
        vectors[i, c] = -(unit + momentum * old[c]) / length
    return norm, np.sqrt(distance)


@compiled(reorder=True)
def sweep(indptr: Any, indices: Any, weights: Any, vectors: Any, order: Any, momentum: float) -> Any:
    """Update the vectors of these vertices in turn, in place.

    Return the sums over the vertices of (|g| |g / |g| + v|)^2 and of |g|^2, at the time of their update.
    """
    size = vectors.shape[1]
    sums, old = np.empty(size), np.empty(size)
    error, scale = 0.0, 0.0
    for step in range(order.shape[0]):
        i = order[step]
        sums[:] = 0.0
        for e in range(indptr[i], indptr[i + 1]):
            j, weight = indices[e], weights[e]
            for c in range(size):
                sums[c] += weight * vectors[j, c]
        norm, distance = _turned(sums, vectors, i, momentum, old)
        error += (norm * distance) ** 2
        scale += norm * norm
    return error, scale


@compiled(inline=True)
def _score(sums: Any, vectors: Any, i: int, greedy: bool) -> Any:
    """Return |g_i| + <g_i, v_i>, half the decrease that an update would give, or |g_i|, its weight in a draw."""
    norm, product = 0.0, 0.0
    for c in range(vectors.shape[1]):
        norm += sums[i, c] * sums[i, c]
        product += sums[i, c] * vectors[i, c]
    norm = np.sqrt(norm)
    return norm + product if greedy else norm


@compiled(inline=True)
def _set_leaf(tree: Any, node: int, value: float, greedy: bool) -> None:
    """Set a leaf of a binary tree of sums, or of largest values, and all above it."""
    tree[node] = value
    node //= 2
    while node >= 1:
        left, right = tree[2 * node], tree[2 * node + 1]
        tree[node] = max(left, right) if greedy else left + right
        node //= 2


@compiled(inline=True)
def _leaves(count: int) -> int:
    """Return the least power of two that is not below a count."""
    leaves = 1
    while leaves < count:
        leaves *= 2
    return leaves


@compiled(inline=True)
def _drawn(tree: Any, uniform: float, greedy: bool) -> int:
    """Return the leaf with the largest value, or the one that holds this share of the sum."""
    node, left_over = 1, uniform * tree[1]
    while 2 * node < tree.shape[0]:
        node *= 2
        if greedy:
            node += int(tree[node] < tree[node + 1])
        elif left_over >= tree[node] and tree[node + 1] > 0.0:
            left_over -= tree[node]
            node += 1
    return node


@compiled(reorder=True)
def chosen_updates(
    indptr: Any, indices: Any, weights: Any, vectors: Any, sums: Any, uniform: Any, greedy: bool, momentum: float
) -> Any:
    """Update as many chosen vertices as `uniform` has values, in place, `sums` g = W V [n, k] with them.

    Greedy: each time the vertex whose update decreases the objective most. Otherwise vertex i is drawn with a
    probability proportional to |g_i|, by a value of `uniform` in [0, 1). An update costs O(degree (k + log n)).
    Returns as `sweep`.
    """
    count, size = vectors.shape
    tree = np.zeros(2 * _leaves(count))
    leaves = tree.shape[0] // 2
    for i in range(count):
        _set_leaf(tree, leaves + i, _score(sums, vectors, i, greedy), greedy)
    old, at = np.empty(size), np.empty(size)
    error, scale = 0.0, 0.0
    for draw in range(uniform.shape[0]):
        node = _drawn(tree, uniform[draw], greedy)
        i = node - leaves
        for c in range(size):
            at[c] = sums[i, c]
        norm, distance = _turned(at, vectors, i, momentum, old)
        error += (norm * distance) ** 2
        scale += norm * norm
        if norm == 0.0:
            continue
        for e in range(indptr[i], indptr[i + 1]):
            j, weight = indices[e], weights[e]
            for c in range(size):
                sums[j, c] += weight * (vectors[i, c] - old[c])
            _set_leaf(tree, leaves + j, _score(sums, vectors, j, greedy), greedy)
        if greedy:
            _set_leaf(tree, node, _score(sums, vectors, i, greedy), greedy)
    return error, scale


@compiled(reorder=True)
def pair_products(rows: Any, columns: Any, vectors: Any, right: Any) -> Any:
    """Return (<v_i, u_j> + <u_i, v_j>) / 2 of pairs (i, j) = (rows[q], columns[q]), for V and U = `right` [n, k]."""
    products = np.zeros(rows.shape[0])
    for q in range(rows.shape[0]):
        i, j = rows[q], columns[q]
        total = 0.0
        for c in range(vectors.shape[1]):
            total += vectors[i, c] * right[j, c] + right[i, c] * vectors[j, c]
        products[q] = total / 2
    return products
