"""Sparse symmetric matrices A_1, ..., A_m of linear constraints, and the products that solvers take with them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from narrowcast.algorithms.sdp.vector_kernels import pair_products
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import FloatArray, IntArray

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_ROUNDING = 1e-12
"""Of the largest entry of a matrix, by which mirror images may differ: those of computed matrices do."""


@dataclass(frozen=True, eq=False)
class SymmetricConstraints:
    """The entries of m symmetric matrices of side n, as values at the p places that any of them has an entry at.

    Shapes: rows and columns [p], rows <= columns, sorted by row and column; values [m, p] in compressed rows, value
    (i, q) being the entry of A_i at (rows[q], columns[q]) and at its mirror image.
    """

    size: int
    rows: IntArray
    columns: IntArray
    values: csr_array

    @property
    def count(self) -> int:
        """The number of matrices m."""
        return int(self.values.shape[0])

    def of_vectors(self, vectors: FloatArray, others: FloatArray | None = None) -> FloatArray:
        """Return <A_i, V V'> [m] for V [n, k], or with others U [n, k] <A_i, (V U' + U V') / 2>."""
        places = pair_products(self.rows, self.columns, vectors, vectors if others is None else others)
        return np.asarray(self._doubled @ places)

    def of_matrix(self, matrix: FloatArray) -> FloatArray:
        """Return <A_i, X> [m] for a dense symmetric X [n, n]."""
        return np.asarray(self._doubled @ matrix[self.rows, self.columns])

    def adjoint(self, dual: FloatArray) -> csr_array:
        """Return sum_i y_i A_i [n, n] for y = `dual` [m]."""
        return self._of_places(self.values.T @ dual)

    @property
    def pattern(self) -> csr_array:
        """Ones at the places that any A_i has an entry at, [n, n]."""
        return self._of_places(np.ones(len(self.rows)))

    def _of_places(self, values: FloatArray) -> csr_array:
        from scipy.sparse import csr_array

        indptr, indices, places = self._pattern
        return csr_array((values[places], indices, indptr), shape=(self.size, self.size))

    @cached_property
    def digest(self) -> str:
        """The sha256 of the matrices."""
        found = hashlib.sha256(str((self.size, self.count)).encode())
        values = self.values
        for array in (self.rows, self.columns, values.indptr, values.indices):
            found.update(np.ascontiguousarray(array, dtype=np.int64).data)
        found.update(np.ascontiguousarray(values.data, dtype=np.float64).data)
        return found.hexdigest()

    @cached_property
    def _doubled(self) -> csr_array:
        """Return the values, twice those off the diagonal: products with half of a symmetric matrix."""
        from scipy.sparse import csr_array, diags_array

        return csr_array(self.values @ diags_array(np.where(self.rows == self.columns, 1.0, 2.0)))

    @cached_property
    def _pattern(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return indptr and indices of the places with their mirror images, and the place of each entry."""
        off = np.flatnonzero(self.rows != self.columns)
        rows = np.concatenate([self.rows, self.columns[off]])
        columns = np.concatenate([self.columns, self.rows[off]])
        places = np.concatenate([np.arange(len(self.rows)), off])
        order = np.lexsort((columns, rows))
        indptr = np.zeros(self.size + 1, dtype=np.int64)
        np.cumsum(np.bincount(rows, minlength=self.size), out=indptr[1:])
        return indptr, columns[order], places[order]


def constraints_of(
    size: int,
    count: int,
    constraint: IntArray,
    row: IntArray,
    column: IntArray,
    value: FloatArray,
    *,
    first_number: int = 1,
) -> SymmetricConstraints:
    """Return the constraints with these entries, numbered from 0, one triangle or both; all four arrays are [entries].

    Errors count the matrices from `first_number`, rows and columns from 1.

    An entry that is given with its mirror image has to equal it up to rounding, and that of the upper triangle is
    taken; entries of the value 0 are left out. Raise `UserError` for a place outside the matrices, an entry that is
    given twice, one that differs from its mirror image, and a value that is no number.
    """
    from scipy.sparse import csr_array

    for label, numbers, most in (("matrix", constraint, count), ("row", row, size), ("column", column, size)):
        if len(wrong := np.flatnonzero((numbers < 0) | (numbers >= most))):
            place = int(wrong[0])
            raise UserError(f"entry {place + 1} has the {label} {numbers[place] + 1}; 1 to {most} are allowed")
    if len(wrong := np.flatnonzero(~np.isfinite(value))):
        raise UserError(f"entry {wrong[0] + 1} has the value {value[wrong[0]]}; give finite values")
    low, high = np.minimum(row, column), np.maximum(row, column)
    order = np.lexsort((row > column, high, low, constraint))
    keys = np.stack([constraint, low, high])[:, order]
    same = (keys[:, 1:] == keys[:, :-1]).all(axis=0)
    largest = np.zeros(count)
    np.maximum.at(largest, constraint, np.abs(value))
    for earlier in np.flatnonzero(same).tolist():
        one, other = order[earlier], order[earlier + 1]
        named = f"({row[one] + 1}, {column[one] + 1}) of matrix {constraint[one] + first_number}"
        if row[one] == row[other]:
            raise UserError(f"entry {named} is given twice; give each entry once")
        if abs(value[one] - value[other]) > _ROUNDING * largest[constraint[one]]:
            raise UserError(
                f"entry {named} is {value[one]:.17g}, but its mirror image {value[other]:.17g}: the matrix is not "
                "symmetric; give one triangle, or equal values"
            )
    kept = order[np.concatenate([[True], ~same])] if len(order) else order
    kept = kept[value[kept] != 0]
    keys, places = np.unique(low[kept] * size + high[kept], return_inverse=True)
    values = csr_array((value[kept], (constraint[kept], places)), shape=(count, len(keys)), dtype=np.float64)
    values.sort_indices()
    return SymmetricConstraints(size, keys // size, keys % size, values)
