"""The observed entries of a matrix, products of factors on them, and low-rank matrices as factors; none is formed.

The compiled kernels take a sparse pattern in tiles of columns that stay in the processor's cache. A tile has as many
columns as hold `TILE_VALUES` factor values. Entries of a row are taken four at a time within a tile, so sums depend on
the rank and the pattern alone, not on the rows or columns that a call is given.

Shapes of the kernels: indptr [m + 1] int64, indices [p] int32 ascending within a row, values [p], left [m, k], right
[n, k].

A matrix of rank k is left right', whose norms keep the digits that a Gram matrix loses. Leading singular triples are
those of its sum with a sparse one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from narrowcast.platform.compiled import compiled, read_only
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import FloatArray, IntArray, all_finite

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


_WORTH_A_THREAD = 1 << 19
"""Multiplications below which starting a thread takes longer than it saves."""


@dataclass(frozen=True, eq=False)
class ObservedMatrix:
    """The p observed entries of an m x n matrix by rows: P_Omega(M).

    Shapes: indptr [m + 1] int64, indices [p] int32, the columns, ascending within a row; values [p] float64. Vectors of
    values over the entries, such as a residual, have the same order. Threads do not change results: every sum is taken
    by one thread, in an order that the pattern alone sets.
    """

    columns: int
    indptr: IntArray
    indices: NDArray[np.int32]
    values: FloatArray

    @property
    def rows(self) -> int:
        """The number of rows m."""
        return len(self.indptr) - 1

    @property
    def count(self) -> int:
        """The number of observed entries p."""
        return len(self.indices)

    @property
    def fraction(self) -> float:
        """The share of the entries that is observed, p / (m n)."""
        return self.count / (self.rows * self.columns)

    @cached_property
    def norm(self) -> float:
        """The Euclidean norm of the observed values."""
        return float(np.linalg.norm(self.values))

    @cached_property
    def transposed(self) -> ObservedMatrix:
        """The observed entries of the transposed matrix."""
        from scipy import sparse

        turned = sparse.csr_array((self.values, self.indices, self.indptr), shape=(self.rows, self.columns)).tocsc()
        return ObservedMatrix(self.rows, turned.indptr.astype(np.int64), turned.indices.astype(np.int32), turned.data)

    @cached_property
    def _pattern(self) -> tuple[NDArray[Any], NDArray[Any]]:
        return read_only(self.indptr, np.int64), read_only(self.indices, np.int32)

    def row_of_entries(self) -> NDArray[np.int32]:
        """Return the row of each entry [p]."""
        return np.repeat(np.arange(self.rows, dtype=np.int32), np.diff(self.indptr))

    def sampled(self, left: FloatArray, right: FloatArray) -> FloatArray:
        """Return P_Omega(left right') as values [p]; left [m, k], right [n, k]."""
        return self._sampled(left, right, subtract=False)

    def residual(self, left: FloatArray, right: FloatArray) -> FloatArray:
        """Return P_Omega(M - left right') as values [p]; left [m, k], right [n, k]."""
        return self._sampled(left, right, subtract=True)

    def times(self, values: FloatArray, right: FloatArray) -> FloatArray:
        """Return D right [m, k], D having these values at the observed entries and 0 elsewhere; right [n, k]."""
        values, right, out = _read(values), _read(right), np.empty((self.rows, right.shape[1]))
        self._by_rows(lambda a, b: times(*self._pattern, values, right, out, a, b), out)
        return out

    def transposed_times(self, values: FloatArray, left: FloatArray) -> FloatArray:
        """Return D' left [n, k], D having these values at the observed entries and 0 elsewhere; left [m, k]."""
        values, left, out = _read(values), _read(left), np.empty((self.columns, left.shape[1]))

        def work(a: int, b: int) -> None:
            transposed_times(*self._pattern, values, left, out, a, b)

        threads = self._threads(out.shape[1])
        _in_threads(work, np.linspace(0, self.columns, threads + 1).astype(np.int64))
        return out

    def row_fits(self, values: FloatArray, right: FloatArray, ridge: float = 0.0) -> FloatArray:
        """Return the x_i [m, k] that minimise the sum of (values_ij - <x_i, right_j>)^2 + ridge |x_i|^2 over row i."""
        values, right, out = _read(values), _read(right), np.empty((self.rows, right.shape[1]))

        def work(a: int, b: int) -> None:
            row_fits(*self._pattern, values, right, ridge, out, a, b)

        self._by_rows(work, out)
        return out

    def _sampled(self, left: FloatArray, right: FloatArray, *, subtract: bool) -> FloatArray:
        left, right, base, out = _read(left), _read(right), _read(self.values), np.empty(self.count)

        def work(a: int, b: int) -> None:
            sampled_product(*self._pattern, left, right, base, subtract, out, a, b)

        self._by_rows(work, left)
        return out

    def _by_rows(self, work: Callable[[int, int], None], factor: FloatArray) -> None:
        threads = self._threads(factor.shape[1])
        shares = np.linspace(0, self.count, threads + 1)[1:-1]
        _in_threads(work, np.concatenate([[0], np.searchsorted(self.indptr, shares), [self.rows]]))

    def _threads(self, rank: int) -> int:
        return max(1, min(thread_count(), self.count * rank // _WORTH_A_THREAD))


def observe(rows: int, columns: int, row: ArrayLike, column: ArrayLike, values: ArrayLike) -> ObservedMatrix:
    """Return the observed matrix with these entries, in any order.

    Raise `UserError` if there is none, if one is outside of the matrix, not finite, or given twice. Shapes: [p] each.
    """
    row, column = np.asarray(row, dtype=np.int64), np.asarray(column, dtype=np.int64)
    values = np.array(values, dtype=np.float64)
    if not len(values):
        raise UserError("the matrix has no observed entry; give at least one")
    for name, index, size in (("row", row, rows), ("column", column, columns)):
        if (outside := (index < 0) | (index >= size)).any():
            raise UserError(f"an entry is in {name} {index[outside][0]}, but {name}s are 0 to {size - 1}")
    if not all_finite(values):
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        raise UserError(
            f"the entry in row {row[at]}, column {column[at]} is {values[at]}; omit entries that are not known"
        )
    keys = row * columns + column
    if (np.diff(keys) <= 0).any():
        order = np.argsort(keys, kind="stable")
        keys, values = keys[order], values[order]
        if len(again := np.flatnonzero(np.diff(keys) == 0)):
            i, j = divmod(int(keys[again[0]]), columns)
            raise UserError(f"the entry in row {i}, column {j} is given twice; keep one of them")
    return observed_at(rows, columns, keys, values)


def observed_at(rows: int, columns: int, keys: IntArray, values: FloatArray) -> ObservedMatrix:
    """Return the observed matrix with the entries at ascending positions i * columns + j, [p]."""
    indptr = np.searchsorted(keys, np.arange(rows + 1, dtype=np.int64) * columns).astype(np.int64)
    return ObservedMatrix(columns, indptr, (keys % columns).astype(np.int32), values)


def thread_count() -> int:
    """Return OMP_NUM_THREADS, which Ray sets to the processors that a task reserved, else the processors there are."""
    count = os.environ.get("OMP_NUM_THREADS", "")
    if count.isdigit() and int(count):
        return int(count)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read(values: FloatArray) -> FloatArray:
    return read_only(values, np.float64)


def _in_threads(work: Callable[[int, int], None], bounds: IntArray) -> None:
    parts = [(int(a), int(b)) for a, b in pairwise(bounds) if a < b]
    if len(parts) == 1:
        work(*parts[0])
    else:
        list(_pool(len(parts), os.getpid()).map(lambda part: work(*part), parts))


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Return a pool of threads; `process` gives a forked process its own."""
    del process
    return ThreadPoolExecutor(threads)


Triples = tuple[FloatArray, FloatArray, FloatArray]
"""Left vectors [m, k], singular values [k] descending, right vectors [n, k]."""
OVERSAMPLED = 6


def frobenius(left: FloatArray, right: FloatArray) -> float:
    """Return the Frobenius norm of left right'.

    The product of the two triangles of QR factorisations keeps the digits that a Gram matrix loses: a difference of
    stacked factors is measured down to about 1e-16 of their norm.
    """
    return float(np.linalg.norm(np.linalg.qr(left)[1] @ np.linalg.qr(right)[1].T))


def difference(left: FloatArray, right: FloatArray, other_left: FloatArray, other_right: FloatArray) -> float:
    """Return the Frobenius norm of left right' - other_left other_right'."""
    return frobenius(np.hstack([left, -other_left]), np.hstack([right, other_right]))


def truncated(left: FloatArray, right: FloatArray, rank: int) -> Triples:
    """Return the leading singular triples of left right'."""
    q, r = np.linalg.qr(left)
    p, t = np.linalg.qr(right)
    u, s, vt = np.linalg.svd(r @ t.T)
    return q @ u[:, :rank], s[:rank], p @ vt[:rank].T


def leading(
    observed: ObservedMatrix,
    values: FloatArray,
    rank: int,
    start: FloatArray,
    passes: int,
    low_rank: tuple[FloatArray, FloatArray] | None = None,
) -> Triples:
    """Return leading singular triples of D + left right' by subspace iteration from `start` [n, b], b >= rank.

    D has the values at the observed entries; `low_rank` is (left, right), or None. A pass multiplies by the matrix and
    by its transpose, 4 p b + 4 (m + n) k b operations.

    Reference: Halko, Martinsson and Tropp, SIAM Review 53(2), 2011, algorithm 4.4.
    """
    basis, triangle = start, np.empty((0, 0))
    left_basis = np.empty((observed.rows, 0))
    for _ in range(passes):
        left_basis = np.linalg.qr(_plus(observed.times(values, basis), low_rank, basis))[0]
        turned = (low_rank[1], low_rank[0]) if low_rank is not None else None
        image = _plus(observed.transposed_times(values, left_basis), turned, left_basis)
        basis, triangle = np.linalg.qr(image)
    u, s, vt = np.linalg.svd(triangle.T, full_matrices=False)
    return left_basis @ u[:, :rank], s[:rank], basis @ vt[:rank].T


def random_block(observed: ObservedMatrix, rank: int, seed: int, draw: int = 0) -> FloatArray:
    """Return a Gaussian start [n, b] for `leading`, with some columns more than the rank where there are so many."""
    width = min(rank + OVERSAMPLED, observed.rows, observed.columns)
    return generator(seed, "completion start", draw).standard_normal((observed.columns, width))


def _plus(product: FloatArray, low_rank: tuple[FloatArray, FloatArray] | None, block: FloatArray) -> FloatArray:
    return product if low_rank is None else product + low_rank[0] @ (low_rank[1].T @ block)
