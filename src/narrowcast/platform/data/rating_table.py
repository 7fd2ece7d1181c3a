"""Columns of a table of ratings, CSV or Parquet; errors name the first row that cannot be used."""

from __future__ import annotations

import re
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

from narrowcast.platform.data.table_content import Dialect, check_quotes, check_text, header, is_parquet, text_stream
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import IntArray

PARQUET = (".parquet", ".pq")
_DAMAGED_IDS = {
    r"^\d(\.\d+)?E\+\d+$": "an id that a spreadsheet has rounded",
    r"\x00": "an id with a NUL byte",
}
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
    decimal: str = "."

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def ids(self, field: str) -> pa.DictionaryArray:
        """Return the ids of a column as coded text [n].

        Raise `UserError` if one is missing, or if they are neither text nor whole numbers.
        """
        column = self._column(field)
        kind = column.type
        if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise UserError(
                f"{self.path}: column {self.names[field]} holds {kind}, but ids are whole numbers or text; convert it"
            )
        self._check(field, pc.fill_null(pc.equal(column.cast(pa.string()), ""), True), "no id")
        coded = column.combine_chunks().dictionary_encode()
        texts = coded.dictionary.cast(pa.string())
        for pattern, problem in _DAMAGED_IDS.items():
            damaged = np.flatnonzero(pc.match_substring_regex(texts, pattern))
            if len(damaged):
                self._check(field, np.isin(coded.indices.to_numpy(), damaged), problem)
        return pa.DictionaryArray.from_arrays(coded.indices, texts)

    def numbers(self, field: str) -> NDArray[np.float64]:
        """Return a column of numbers [n]; raise `UserError` that names the first row without one."""
        column, problem = self._column(field), "no number"
        if self.decimal == "," and _is_text(column.type):
            column = pc.replace_substring(pc.replace_substring(column, ".", "?"), ",", ".")  # no dot is a decimal mark
        try:
            values = column.cast(pa.float64()).to_numpy()
        except _REFUSED:
            values = _by_pandas(column, "to_numeric").to_numpy(dtype=np.float64)
        wrong = ~np.isfinite(values)
        if self.decimal == "." and wrong.any() and _is_text(column.type):
            first = column[int(np.flatnonzero(wrong)[0])].as_py() or ""
            problem += " (set data.decimal=',')" if re.fullmatch(r"\s*[+-]?\d+,\d+\s*", first) else ""
        self._check(field, wrong, problem)
        return np.asarray(values)

    def times(self, field: str) -> IntArray:
        """Return a column of times as whole numbers [n] of the same order.

        Times are numbers, dates, or dates and times in ISO 8601. Raise `UserError` that names the first row with
        neither.
        """
        column = self._column(field)
        self._check(field, column.is_null(), "no time")
        kind = column.type
        if pa.types.is_date32(kind):
            column = column.cast(pa.int32())
        elif pa.types.is_time(kind) or pa.types.is_boolean(kind):
            raise UserError(
                f"{self.path}: column {self.names[field]} holds {kind}, which is no time; give numbers or dates"
            )
        try:
            return np.asarray(column.cast(pa.int64()).to_numpy())
        except _REFUSED:
            pass
        numbers = _by_pandas(column, "to_numeric").to_numpy(dtype=np.float64)
        if not _is_text(kind) or np.isfinite(numbers).mean() > 0.5:  # numbers with errors among them, rather than dates
            self._check(field, ~np.isfinite(numbers), "no time")
            return np.asarray(np.unique(numbers, return_inverse=True)[1])
        dates = _by_pandas(column, "to_datetime", format="ISO8601", utc=True)
        self._check(field, dates.isna().to_numpy(), "no time (a number, or a date such as 2026-01-31 12:30:00)")
        return np.asarray(dates.astype("int64").to_numpy())

    def _column(self, field: str) -> pa.ChunkedArray:
        """Return a column as plain values: dictionaries resolved, views as text."""
        column = self.table[self.names[field]]
        if pa.types.is_dictionary(column.type):
            column = pa.chunked_array([chunk.dictionary_decode() for chunk in column.chunks], column.type.value_type)
        return column.cast(pa.string()) if pa.types.is_string_view(column.type) else column

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


def _by_pandas(column: pa.ChunkedArray, convert: str, **options: Any) -> Any:
    import pandas as pd  # takes half a second, and is needed for dates and errors only

    function: Callable[..., Any] = getattr(pd, convert)
    return function(column.to_pandas(), errors="coerce", **options)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def read_rating_table(path: Path, names: Mapping[str, str], dialect: Dialect) -> RatingTable:
    """Read the columns `names` of a CSV file, compressed or not, or of a Parquet file.

    The columns of a CSV file without header are called f0, f1, ...; without a delimiter, .tsv files are separated by
    tabs, and others by commas. Raise `UserError` if the file cannot be read or lacks a column.
    """
    try:
        if is_parquet(path) or path.suffix.lower() in PARQUET:
            _check_columns(path, names, pq.read_schema(path).names, dialect)
            table, first_row = pq.read_table(path, columns=list(set(names.values())), partitioning=None), 1
        else:
            table, first_row = _read_csv(path, names, dialect), 1 + dialect.header
        table.validate(full=True)
        return RatingTable(path, names, table, first_row, dialect.decimal)
    except UserError:
        raise
    except (OSError, pa.ArrowException, UnicodeError) as error:
        reason = next(iter(str(error).splitlines()), "unreadable")
        if isinstance(error, UnicodeError) or "UTF8" in reason or "UTF-8" in reason:
            text = dialect.encoding or "UTF-8"
            advice = dialect.advice(f"encoding, such as data.encoding={'utf-8' if dialect.encoding else 'cp1252'}")
            raise UserError(f"{path}: its text is not {text}; {advice}") from error
        raise UserError(f"{path}: {reason:.300}; correct the file") from error


def _read_csv(path: Path, names: Mapping[str, str], dialect: Dialect) -> pa.Table:
    check_text(path, dialect)
    ends = [each.lower() for each in path.suffixes[-2:]]
    delimiter = dialect.delimiter or ("\t" if ".tsv" in ends else ",")
    parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    threads, one_thread = (
        csv.ReadOptions(
            autogenerate_column_names=not dialect.header, use_threads=each, encoding=dialect.encoding or "utf8"
        )
        for each in (True, False)
    )
    if dialect.header:
        _check_columns(path, names, header(path, dialect, delimiter), dialect, delimiter)
    else:
        with text_stream(path) as stream:
            _check_columns(path, names, csv.open_csv(stream, one_thread, parse).schema.names, dialect)
    convert = csv.ConvertOptions(
        column_types=dict.fromkeys(names.values(), pa.string()), include_columns=list(set(names.values()))
    )
    try:
        with text_stream(path) as stream:
            table = csv.read_csv(stream, threads, parse, convert)
    except pa.ArrowInvalid:
        with text_stream(path) as stream:
            table = csv.read_csv(stream, one_thread, parse, convert)  # raises again, with the number of the row
    check_quotes(path, dialect, delimiter, table.num_rows)
    return table


def _check_columns(
    path: Path, names: Mapping[str, str], there: Sequence[str], dialect: Dialect, delimiter: str = ""
) -> None:
    for field, column in names.items():
        if column not in there:
            shown = ", ".join(there[:20]) + (", ..." if len(there) > 20 else "")
            none = ", or say data.time=null if its rows are in order of time" if field == "time" else ""
            alike = next((each for each in there if each.strip().casefold() == column.casefold()), "COLUMN")
            alike = repr(alike) if alike != alike.strip() else alike
            advice = f"{_other_delimiter(there, delimiter)}name the column with data.{field}={alike}{none}"
            advice = advice if dialect.has_fields else "give the columns these names, with commas between them"
            raise UserError(f"{path}: has no column {column!r}, only {shown}; {advice}")
        if there.count(column) > 1:
            raise UserError(f"{path}: has {there.count(column)} columns {column!r}; rename all but one")


def _other_delimiter(there: Sequence[str], delimiter: str) -> str:
    """Return the advice to use the separator that a header without `delimiter` seems to have, empty if it has none."""
    if not delimiter or len(there) != 1:
        return ""
    if there[0].startswith("sep="):
        return f"remove its first line, which only Excel reads, and set data.delimiter={there[0][4:]!r}, or "
    counts = {each: there[0].count(each) for each in ",;\t|" if each != delimiter}
    likely = max(counts, key=lambda each: counts[each])
    shown = '"\\t"' if likely == "\t" else f"'{likely}'"
    return f"separate its columns with data.delimiter={shown}, or " if counts[likely] else ""
