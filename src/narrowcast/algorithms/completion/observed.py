"""The observed entries of a matrix, and products of factors on them; the matrix itself is never formed."""

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

from narrowcast.algorithms.completion import sampled_kernels
from narrowcast.algorithms.local_training.compiled import read_only
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import FloatArray, IntArray, all_finite

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
        self._by_rows(lambda a, b: sampled_kernels.times(*self._pattern, values, right, out, a, b), out)
        return out

    def transposed_times(self, values: FloatArray, left: FloatArray) -> FloatArray:
        """Return D' left [n, k], D having these values at the observed entries and 0 elsewhere; left [m, k]."""
        values, left, out = _read(values), _read(left), np.empty((self.columns, left.shape[1]))

        def work(a: int, b: int) -> None:
            sampled_kernels.transposed_times(*self._pattern, values, left, out, a, b)

        threads = self._threads(out.shape[1])
        _in_threads(work, np.linspace(0, self.columns, threads + 1).astype(np.int64))
        return out

    def row_fits(self, values: FloatArray, right: FloatArray, ridge: float = 0.0) -> FloatArray:
        """Return the x_i [m, k] that minimise the sum of (values_ij - <x_i, right_j>)^2 + ridge |x_i|^2 over row i."""
        values, right, out = _read(values), _read(right), np.empty((self.rows, right.shape[1]))

        def work(a: int, b: int) -> None:
            sampled_kernels.row_fits(*self._pattern, values, right, ridge, out, a, b)

        self._by_rows(work, out)
        return out

    def _sampled(self, left: FloatArray, right: FloatArray, *, subtract: bool) -> FloatArray:
        left, right, base, out = _read(left), _read(right), _read(self.values), np.empty(self.count)

        def work(a: int, b: int) -> None:
            sampled_kernels.sampled_product(*self._pattern, left, right, base, subtract, out, a, b)

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
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given):
        return int(given)
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
