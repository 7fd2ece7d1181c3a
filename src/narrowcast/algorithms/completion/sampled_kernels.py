"""Compiled products of factors with a sparse pattern, in tiles of columns that stay in the processor's cache.

A tile has as many columns as hold `TILE_VALUES` factor values. Entries of a row are taken four at a time within a tile,
so sums depend on the rank and the pattern alone, not on the rows or columns that a call is given.

Shapes: indptr [m + 1] int64, indices [p] int32 ascending within a row, values [p], left [m, k], right [n, k].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from narrowcast.algorithms.local_training.compiled import compiled

TILE_VALUES = 1 << 16
"""Half a MiB of float64, half of a usual second-level cache."""
_ROWS = 128


@compiled(reorder=True)
def sampled_product(
    indptr: Any, indices: Any, left: Any, right: Any, base: Any, subtract: bool, out: Any, first: int, last: int
) -> None:
    """Set out[e] to <left_i, right_j> for the entries e = (i, j) of rows first..last-1, or to base[e] minus it."""
    rank = right.shape[1]
    tile = max(64, TILE_VALUES // rank)
    cursor = np.empty(_ROWS, dtype=np.int64)
    for begin in range(first, last, _ROWS):
        end = min(begin + _ROWS, last)
        for i in range(begin, end):
            cursor[i - begin] = indptr[i]
        for edge in range(tile, right.shape[0] + tile, tile):
            for i in range(begin, end):
                k, stop = cursor[i - begin], indptr[i + 1]
                while k + 4 <= stop and indices[k + 3] < edge:
                    j0, j1 = np.int64(indices[k]), np.int64(indices[k + 1])
                    j2, j3 = np.int64(indices[k + 2]), np.int64(indices[k + 3])
                    s0, s1, s2, s3 = 0.0, 0.0, 0.0, 0.0
                    for c in range(rank):
                        u = left[i, c]
                        s0 += u * right[j0, c]
                        s1 += u * right[j1, c]
                        s2 += u * right[j2, c]
                        s3 += u * right[j3, c]
                    if subtract:
                        s0, s1 = base[k] - s0, base[k + 1] - s1
                        s2, s3 = base[k + 2] - s2, base[k + 3] - s3
                    out[k], out[k + 1], out[k + 2], out[k + 3] = s0, s1, s2, s3
                    k += 4
                while k < stop and indices[k] < edge:
                    j = np.int64(indices[k])
                    s = 0.0
                    for c in range(rank):
                        s += left[i, c] * right[j, c]
                    out[k] = base[k] - s if subtract else s
                    k += 1
                cursor[i - begin] = k


@compiled(reorder=True)
def times(indptr: Any, indices: Any, values: Any, right: Any, out: Any, first: int, last: int) -> None:
    """Set rows first..last-1 of out [m, k] to those of D right, D being the sparse matrix of the values."""
    rank = right.shape[1]
    tile = max(64, TILE_VALUES // rank)
    cursor = np.empty(_ROWS, dtype=np.int64)
    for begin in range(first, last, _ROWS):
        end = min(begin + _ROWS, last)
        for i in range(begin, end):
            cursor[i - begin] = indptr[i]
            for c in range(rank):
                out[i, c] = 0.0
        for edge in range(tile, right.shape[0] + tile, tile):
            for i in range(begin, end):
                k, stop = cursor[i - begin], indptr[i + 1]
                while k + 4 <= stop and indices[k + 3] < edge:
                    j0, j1 = np.int64(indices[k]), np.int64(indices[k + 1])
                    j2, j3 = np.int64(indices[k + 2]), np.int64(indices[k + 3])
                    d0, d1, d2, d3 = values[k], values[k + 1], values[k + 2], values[k + 3]
                    for c in range(rank):
                        out[i, c] += (d0 * right[j0, c] + d1 * right[j1, c]) + (d2 * right[j2, c] + d3 * right[j3, c])
                    k += 4
                while k < stop and indices[k] < edge:
                    j, d = np.int64(indices[k]), values[k]
                    for c in range(rank):
                        out[i, c] += d * right[j, c]
                    k += 1
                cursor[i - begin] = k


@compiled(reorder=True)
def transposed_times(indptr: Any, indices: Any, values: Any, left: Any, out: Any, first: int, last: int) -> None:
    """Set rows first..last-1 of out [n, k] to those of D' left; rows of D are added in ascending order."""
    rows, rank = left.shape
    tile = max(64, TILE_VALUES // rank)
    cursor = np.empty(rows, dtype=np.int64)
    for i in range(rows):
        low, high = indptr[i], indptr[i + 1]
        while first > 0 and low < high:
            middle = (low + high) // 2
            if indices[middle] < first:
                low = middle + 1
            else:
                high = middle
        cursor[i] = low
    for begin in range(first, last, tile):
        edge = min(begin + tile, last)
        for j in range(begin, edge):
            for c in range(rank):
                out[j, c] = 0.0
        for i in range(rows):
            k, stop = cursor[i], indptr[i + 1]
            while k < stop and indices[k] < edge:
                column, d = np.int64(indices[k]), values[k]
                for c in range(rank):
                    out[column, c] += d * left[i, c]
                k += 1
            cursor[i] = k


@compiled(reorder=True, inline=True)
def _solve(gram: Any, x: Any) -> None:
    """Replace x by the solution of gram y = x, by Cholesky in place of the lower triangle."""
    rank = len(x)
    trace = 0.0
    for a in range(rank):
        trace += gram[a, a]
    if trace <= 0.0:
        return
    for a in range(rank):
        gram[a, a] += 1e-14 * trace
    for a in range(rank):
        for b in range(a + 1):
            s = gram[a, b]
            for c in range(b):
                s -= gram[a, c] * gram[b, c]
            gram[a, b] = np.sqrt(max(s, 1e-15 * trace)) if a == b else s / gram[b, b]
    for a in range(rank):
        s = x[a]
        for c in range(a):
            s -= gram[a, c] * x[c]
        x[a] = s / gram[a, a]
    for a in range(rank - 1, -1, -1):
        s = x[a]
        for c in range(a + 1, rank):
            s -= gram[c, a] * x[c]
        x[a] = s / gram[a, a]


@compiled(reorder=True)
def row_fits(indptr: Any, indices: Any, values: Any, right: Any, ridge: float, out: Any, first: int, last: int) -> None:
    """Set out_i to the least-squares solution of <x, right_j> = values_ij over the entries of each row first..last-1.

    `ridge` times |x|^2 is added for each entry. Normal equations by Cholesky; a row with too few entries has its
    diagonal raised by 1e-14 of its trace.
    """
    rank = right.shape[1]
    gram = np.empty((rank, rank))
    for i in range(first, last):
        x = out[i]
        for a in range(rank):
            x[a] = 0.0
            for b in range(a + 1):
                gram[a, b] = 0.0
        for k in range(indptr[i], indptr[i + 1]):
            j, d = np.int64(indices[k]), values[k]
            for a in range(rank):
                v = right[j, a]
                x[a] += d * v
                for b in range(a + 1):
                    gram[a, b] += v * right[j, b]
        for a in range(rank):
            gram[a, a] += ridge * (indptr[i + 1] - indptr[i])
        _solve(gram, x)
