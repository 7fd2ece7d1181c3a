"""The files of the Planetoid data sets, which are pickles of Python 2, read without running what they name.

A pickle names functions that are called while it is read, so that one from the web may run any code. Here the only
names that it may use are the constructors of arrays; sparse matrices become plain records whose arrays are checked.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.data.own_files import readable
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import IntArray

_MOST_VALUES = 2**28
_ADVICE = "download the file again"
_UNREADABLE = (
    OSError, ValueError, LookupError, EOFError, TypeError, AttributeError, RuntimeError, MemoryError, OverflowError,
    pickle.UnpicklingError,
)  # fmt: skip
"""Errors of pickle and NumPy on damaged files."""


class _Matrix:
    """The attributes of a pickled sparse matrix."""

    data: Any
    indices: Any
    indptr: Any
    _shape: Any


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("scipy.sparse.csr", "csr_matrix"): _Matrix,
    ("collections", "defaultdict"): defaultdict,
    ("__builtin__", "list"): list,
    ("builtins", "list"): list,
}


class _ArraysOnly(pickle.Unpickler):
    """Unpickles arrays, sparse matrices and lists, and refuses everything else that a pickle may name."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the few classes that arrays are made of."""
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"names {module}.{name}, which is no part of an array") from None


def read_features(path: Path) -> NDArray[np.float32]:
    """Return the dense features of a sparse matrix in compressed rows, [n, d]."""
    found = _read(path)
    with readable(path, _UNREADABLE, _ADVICE):
        if not isinstance(found, _Matrix):
            raise UserError(f"{path}: has {type(found).__name__}, expected a sparse matrix; {_ADVICE}")
        n_rows, n_columns = (int(size) for size in found._shape)
        indptr, columns = (np.asarray(each, dtype=np.int64) for each in (found.indptr, found.indices))
        with np.errstate(over="ignore"):  # refused below as not finite
            values = np.asarray(found.data, dtype=np.float32)
        rises = indptr.shape == (n_rows + 1,) and indptr[0] == 0 and (np.diff(indptr) >= 0).all()
        inside = columns.ndim == 1 and ((columns >= 0) & (columns < n_columns)).all()
        if not (0 < n_rows * n_columns <= _MOST_VALUES and rises and inside):
            raise UserError(f"{path}: is no matrix in compressed rows; {_ADVICE}")
        if not indptr[-1] == len(columns) == len(values):
            raise UserError(f"{path}: has {len(columns)} columns for {len(values)} values; {_ADVICE}")
        if not np.isfinite(values).all():
            raise UserError(f"{path}: has a value that is not finite in float32; {_ADVICE}")
        features = np.zeros((n_rows, n_columns), dtype=np.float32)
        features[np.repeat(np.arange(n_rows), np.diff(indptr)), columns] = values
    return features


def read_classes(path: Path) -> tuple[IntArray, int]:
    """Return the class of each row of a one-hot matrix, [n], and the number of classes."""
    found = _read(path)
    if not (isinstance(found, np.ndarray) and found.ndim == 2 and found.dtype.kind in "iuf"):
        raise UserError(f"{path}: has no matrix of classes; {_ADVICE}")
    if not ((found == 0) | (found == 1)).all() or not (found.sum(axis=1) == 1).all():
        raise UserError(f"{path}: a row has not one class; {_ADVICE}")
    return found.argmax(axis=1).astype(np.int64), found.shape[1]


def read_edges(path: Path) -> IntArray:
    """Return the edges of lists of neighbours, [k, 2], in the order of the nodes."""
    found = _read(path)
    if not isinstance(found, dict):
        raise UserError(f"{path}: has {type(found).__name__}, expected lists of neighbours; {_ADVICE}")
    with readable(path, _UNREADABLE, _ADVICE):
        pairs = [(node, other) for node, others in found.items() for other in others]
        if not pairs or not all(type(end) is int for pair in pairs for end in pair):
            raise UserError(f"{path}: neighbours are not numbers of nodes; {_ADVICE}")
        return np.array(sorted(pairs), dtype=np.int64)


def read_index(path: Path) -> IntArray:
    """Return the numbers in a text file, one a line."""
    with readable(path, _UNREADABLE, _ADVICE):
        numbers = np.array(path.read_text(encoding="ascii").split(), dtype=np.int64)
    if not len(numbers):
        raise UserError(f"{path}: is empty; {_ADVICE}")
    return numbers


def _read(path: Path) -> Any:
    with readable(path, _UNREADABLE, _ADVICE), path.open("rb") as file:
        return _ArraysOnly(file, encoding="latin1").load()
