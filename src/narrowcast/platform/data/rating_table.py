"""Columns of a table of ratings, CSV or Parquet; errors name the first row that cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import csv

from narrowcast.platform.errors import UserError
from narrowcast.platform.types import IntArray

PARQUET = (".parquet", ".pq")
_REFUSED = (pa.ArrowInvalid, pa.ArrowNotImplementedError)


@dataclass(frozen=True)
class RatingTable:
    """The columns of one file; `names` maps fields of the experiment to columns.

    `first_row` is the number of the first row in messages: 2 after a header, as spreadsheets count.
    """

    path: Path
    names: Mapping[str, str]
    table: pa.Table
    first_row: int

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def ids(self, field: str) -> pa.DictionaryArray:
        """Return the ids of a column as coded text [n].

        Raise `UserError` if one is missing, or if they are neither text nor whole numbers.
        """
        column = self.table[self.names[field]]
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        kind = column.type
        if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise UserError(
                f"{self.path}: column {self.names[field]} holds {kind}, but ids are whole numbers or text; convert it"
            )
        self._check(field, pc.fill_null(pc.equal(column.cast(pa.string()), ""), True), "no id")
        coded = column.combine_chunks().dictionary_encode()
        return pa.DictionaryArray.from_arrays(coded.indices, coded.dictionary.cast(pa.string()))

    def numbers(self, field: str) -> NDArray[np.float64]:
        """Return a column of numbers [n]; raise `UserError` that names the first row without one."""
        try:
            values = self.table[self.names[field]].cast(pa.float64()).to_numpy()
        except _REFUSED:
            values = self._by_pandas(field, "to_numeric").to_numpy(dtype=np.float64)
        self._check(field, ~np.isfinite(values), "no number")
        return np.asarray(values)

    def times(self, field: str) -> IntArray:
        """Return a column of times as whole numbers [n] of the same order.

        Times are numbers, or dates and times in ISO 8601. Raise `UserError` that names the first row with neither.
        """
        column = self.table[self.names[field]]
        try:
            if not column.null_count:
                return np.asarray(column.cast(pa.int64()).to_numpy())
        except _REFUSED:
            pass
        numbers = self._by_pandas(field, "to_numeric").to_numpy(dtype=np.float64)
        if np.isfinite(numbers).mean() > 0.5:  # numbers with errors among them, rather than dates
            self._check(field, ~np.isfinite(numbers), "no time")
            return np.asarray(np.unique(numbers, return_inverse=True)[1])
        dates = self._by_pandas(field, "to_datetime", format="ISO8601", utc=True)
        self._check(field, dates.isna().to_numpy(), "no time (a number, or a date such as 2026-01-31 12:30:00)")
        return np.asarray(dates.astype("int64").to_numpy())

    def _by_pandas(self, field: str, convert: str, **options: Any) -> Any:
        import pandas as pd  # takes half a second, and is needed for dates and errors only

        function: Callable[..., Any] = getattr(pd, convert)
        return function(self.table[self.names[field]].to_pandas(), errors="coerce", **options)

    def _check(self, field: str, wrong: Any, problem: str) -> None:
        rows = np.flatnonzero(np.asarray(wrong))
        if len(rows):
            column = self.names[field]
            got = self.table[column][int(rows[0])].as_py()
            others = f", and {len(rows) - 1} other rows" if len(rows) > 1 else ""
            raise UserError(
                f"{self.path}: row {rows[0] + self.first_row} has {problem} in column {column} (it has {got!r:.60})"
                f"{others}; correct or remove these rows"
            )


def read_rating_table(
    path: Path, names: Mapping[str, str], delimiter: str | None, *, header: bool, renamed: bool = True
) -> RatingTable:
    """Read the columns `names` of a CSV file, gzipped or not, or of a Parquet file.

    The columns of a CSV file without header are called f0, f1, ...; without a delimiter, .tsv files are separated by
    tabs, and others by commas. `renamed`: the experiment may name other columns. Raise `UserError` if the file cannot
    be read or lacks a column.
    """
    try:
        if path.suffix.lower() in PARQUET:
            _check_columns(path, names, pq.read_schema(path).names, renamed=renamed)
            table, first_row = pq.read_table(path, columns=list(set(names.values()))), 1
        else:
            table, first_row = _read_csv(path, names, delimiter, header=header, renamed=renamed), 1 + header
        table.validate(full=True)
        return RatingTable(path, names, table, first_row)
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: its text is not UTF-8; write it in UTF-8") from error
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: {str(error).splitlines()[0]:.300}; correct the file") from error


def _read_csv(path: Path, names: Mapping[str, str], delimiter: str | None, *, header: bool, renamed: bool) -> pa.Table:
    suffix = Path(path.stem).suffix if path.suffix.lower() == ".gz" else path.suffix
    parse = csv.ParseOptions(delimiter=delimiter or ("\t" if suffix.lower() == ".tsv" else ","))
    threads, one_thread = (
        csv.ReadOptions(autogenerate_column_names=not header, use_threads=each) for each in (True, False)
    )
    try:
        _check_columns(path, names, csv.open_csv(path, threads, parse).schema.names, renamed=renamed)
        convert = csv.ConvertOptions(
            column_types=dict.fromkeys(names.values(), pa.string()), include_columns=list(set(names.values()))
        )
        return csv.read_csv(path, threads, parse, convert)
    except pa.ArrowInvalid:
        return csv.read_csv(path, one_thread, parse)  # raises again, with the number of the row


def _check_columns(path: Path, names: Mapping[str, str], there: Sequence[str], *, renamed: bool) -> None:
    for field, column in names.items():
        if column not in there:
            shown = ", ".join(there[:20]) + (", ..." if len(there) > 20 else "")
            none = ", or say data.time=null if its rows are in order of time" if field == "time" else ""
            advice = f"name the column with data.{field}=COLUMN{none}" if renamed else "give the columns these names"
            raise UserError(f"{path}: has no column {column!r}, only {shown}; {advice}")
        if there.count(column) > 1:
            raise UserError(f"{path}: has {there.count(column)} columns {column!r}; rename all but one")
