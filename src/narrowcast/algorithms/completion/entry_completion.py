"""Observed entries of one's own, from a table or from NumPy's .npz files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.completion.completion_problem import LOWER_IS_BETTER, Completion, HeldOut
from narrowcast.algorithms.completion.observed import observe
from narrowcast.platform.data.npz_arrays import npz_arrays
from narrowcast.platform.data.own_files import located
from narrowcast.platform.data.rating_table import PARQUET, read_rating_table
from narrowcast.platform.data.table_content import Dialect
from narrowcast.platform.errors import UserError
from narrowcast.platform.section import Section
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import FloatArray, IntArray

_NAMES = ("row", "column", "value")
_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", *PARQUET, ".npz")
MOST_SIDE = 10**7
"""Rows or columns."""


class EntryCompletion(Section):
    """Entries of a matrix, one a row of a CSV or Parquet file: its row and column, from 0, and its value.

    An .npz file has arrays `row`, `column` and `value` instead. A random share of the entries is held out for testing.
    """

    lower_is_better: ClassVar[tuple[str, ...]] = LOWER_IS_BETTER

    kind: Literal["entry_completion"] = "entry_completion"
    path: Path = Field(description="file of the entries: .csv, .tsv, either with .gz, .parquet or .npz")
    rows: int | None = Field(
        None, ge=1, le=MOST_SIDE, description="number of rows; null: up to the last one with an entry"
    )
    columns: int | None = Field(
        None, ge=1, le=MOST_SIDE, description="number of columns; null: up to the last one with an entry"
    )
    test_share: float = Field(0.1, ge=0, lt=1, description="share of the entries that is held out for testing")
    seed: int | None = Field(None, ge=0, description="seed of the held-out entries; null: that of the run")

    def load(self) -> Completion:
        """Return the problem; raise `UserError` if the file is none of these, or an entry cannot be used."""
        path = located(self.path, "path", "problem")
        row, column, value = self._arrays(path)
        rows = self.rows or int(row.max(initial=0)) + 1
        columns = self.columns or int(column.max(initial=0)) + 1
        try:
            observe(rows, columns, row, column, value)
            held_out = np.zeros(len(value), dtype=bool)
            order = generator(self.seed or 0, "completion held out").permutation(len(value))
            held_out[order[: min(round(self.test_share * len(value)), len(value) - 1)]] = True
            test = HeldOut(row[held_out], column[held_out], value[held_out]) if held_out.any() else None
            observed = observe(rows, columns, row[~held_out], column[~held_out], value[~held_out])
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        return Completion(path.name, str(path), observed, held_out=test)

    def _arrays(self, path: Path) -> tuple[IntArray, IntArray, FloatArray]:
        name = path.name.lower()
        if not name.endswith(_SUFFIXES):
            raise UserError(f"{path}: no table of entries by its name; give a file that ends in {', '.join(_SUFFIXES)}")
        if name.endswith(".npz"):
            found = _npz(path)
        else:
            names = {each: each for each in _NAMES}
            table = read_rating_table(path, names, Dialect(has_fields=False))
            found = [table.numbers(name) for name in _NAMES]
        row, column, value = found
        if any(each.ndim != 1 or len(each) != len(value) or each.dtype.kind not in "iuf" for each in found):
            shapes = ", ".join(f"{name} {each.dtype} {each.shape}" for name, each in zip(_NAMES, found, strict=True))
            raise UserError(f"{path}: has {shapes}; give three lists of numbers of one length")
        for name, index in (("row", row), ("column", column)):
            wrong = np.flatnonzero(~((index >= 0) & (index < MOST_SIDE) & (index == np.floor(index))))
            if len(wrong):
                got = f"entry {wrong[0]} has the {name} {index[wrong[0]]}"
                raise UserError(f"{path}: {got}; {name}s are whole numbers from 0 to {MOST_SIDE - 1}")
        return row.astype(np.int64), column.astype(np.int64), value.astype(np.float64)


def _npz(path: Path) -> list[NDArray[Any]]:
    with npz_arrays(path, "row, column and value") as arrays:
        if missing := [name for name in _NAMES if name not in arrays.files]:
            there = ", ".join(arrays.files) or "nothing"
            raise UserError(f"{path}: has no array {missing[0]}, only {there}; write row, column and value")
        return [np.atleast_1d(arrays[name]) for name in _NAMES]
