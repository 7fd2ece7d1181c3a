"""Implicit feedback from a user's CSV or Parquet files of ratings, with one client per user.

The rows are read as columns (`RatingTable`), the ids of all files are numbered (`NumberedIds`), and each user's items
are split: by time, or as files of test and validation items say (`given_split`). Errors name the first row that cannot
be used.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import csv
from pydantic import Field, model_validator

from narrowcast.platform.config.files import Section
from narrowcast.platform.data.dataset import DataSource
from narrowcast.platform.data.download import located
from narrowcast.platform.data.interactions import (
    NEGATIVES,
    NO_ITEM,
    Events,
    Interactions,
    Validation,
    draw_negatives,
    hold_out,
    leave_one_out,
    order_by_time,
    row_starts,
)
from narrowcast.platform.data.table_content import (
    Decimal,
    Delimiter,
    Dialect,
    Encoding,
    check_quotes,
    check_text,
    header,
    is_parquet,
    text_stream,
)
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
                f"{self.path}: column {self.names[field]} holds {kind}, which is not a time; give numbers or dates"
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
    ends = [suffix.lower() for suffix in path.suffixes[-2:]]
    delimiter = dialect.delimiter or ("\t" if ".tsv" in ends else ",")
    parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    threads, one_thread = (
        csv.ReadOptions(
            autogenerate_column_names=not dialect.header, use_threads=use_threads, encoding=dialect.encoding or "utf8"
        )
        for use_threads in (True, False)
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
    path: Path, names: Mapping[str, str], columns: Sequence[str], dialect: Dialect, delimiter: str = ""
) -> None:
    for field, column in names.items():
        if column not in columns:
            shown = ", ".join(columns[:20]) + (", ..." if len(columns) > 20 else "")
            none = ", or say data.time=null if its rows are in order of time" if field == "time" else ""
            alike = next((name for name in columns if name.strip().casefold() == column.casefold()), "COLUMN")
            alike = repr(alike) if alike != alike.strip() else alike
            advice = f"{_other_delimiter(columns, delimiter)}name the column with data.{field}={alike}{none}"
            advice = advice if dialect.has_fields else "give the columns these names, with commas between them"
            raise UserError(f"{path}: has no column {column!r}, only {shown}; {advice}")
        if columns.count(column) > 1:
            raise UserError(f"{path}: has {columns.count(column)} columns {column!r}; rename all but one")


def _other_delimiter(columns: Sequence[str], delimiter: str) -> str:
    """Return the advice to use the separator that a header without `delimiter` seems to have, empty if it has none."""
    if not delimiter or len(columns) != 1:
        return ""
    if columns[0].startswith("sep="):
        return f"remove its first line, which only Excel reads, and set data.delimiter={columns[0][4:]!r}, or "
    counts = {separator: columns[0].count(separator) for separator in ",;\t|" if separator != delimiter}
    likely = max(counts, key=lambda separator: counts[separator])
    shown = '"\\t"' if likely == "\t" else f"'{likely}'"
    return f"separate its columns with data.delimiter={shown}, or " if counts[likely] else ""


@dataclass(frozen=True)
class NumberedIds:
    """Ids of all files, numbered in ascending order: as whole numbers if all are, else as text.

    Shapes: numbers[field] [n] are those of the rows of a file; `ids` are their names in messages.
    """

    numbers: Mapping[str, IntArray]
    ids: Sequence[str]

    @classmethod
    def of(cls, tables: Mapping[str, RatingTable], field: str) -> Self:
        """Number the ids of one column of all files."""
        coded = {name: table.ids(field) for name, table in tables.items()}
        texts = pa.concat_arrays([array.dictionary for array in coded.values()]).unique()
        try:
            whole = texts.cast(pa.int64())
            are_whole = whole.cast(pa.string()).equals(texts)
        except pa.ArrowInvalid:
            are_whole = False
        ids = texts.take(pc.sort_indices(whole if are_whole else texts))
        numbers = {
            name: pc.index_in(codes.dictionary, ids).to_numpy().astype(np.int64)[codes.indices.to_numpy()]
            for name, codes in coded.items()
        }
        return cls(numbers, ids.to_pylist())


def given_split(
    name: str,
    tables: Mapping[str, RatingTable],
    events: Events,
    users: NumberedIds,
    items: NumberedIds,
    *,
    validation: Validation,
    seed: int,
    n_negatives: int,
) -> Interactions:
    """Return the training rows `events` with the held-out items of the tables `test_path` and `validation_path`.

    Without the latter, validation items are taken from the training rows. Items are those of all files. Raise
    `UserError` that names a user who is unknown, has no test item or several, or is trained on an item held out.
    """
    known, train_users = np.unique(events.users, return_inverse=True)
    train = Events(train_users, events.items, events.timestamps)
    held_out = {
        field: _one_per_user(table, users, items, field, known) for field, table in tables.items() if field != "path"
    }
    test = held_out["test_path"]
    if (untested := np.flatnonzero(test == NO_ITEM)).size:
        raise UserError(
            f"{tables['test_path'].path}: has no row of user {users.ids[known[untested[0]]]}, one of {len(untested)} "
            "without a test item; give one row for each user of the training rows"
        )
    for field, held in held_out.items():
        if (leaked := np.flatnonzero(held[train_users] == train.items)).size:
            user, item = users.ids[events.users[leaked[0]]], items.ids[train.items[leaked[0]]]
            raise UserError(
                f"{tables[field].path}: item {item} of user {user} is in the training rows too, as are {len(leaked)} "
                "in all; remove them from the training rows"
            )
    validation_items = held_out.get("validation_path")
    if validation_items is not None and (same := np.flatnonzero(validation_items == test)).size:
        raise UserError(
            f"{tables['validation_path'].path}: the item of user {users.ids[known[same[0]]]} is its test item too; "
            "hold out different items"
        )
    rows = order_by_time(train)
    n_items = len(items.ids)
    indptr, kept, drawn = hold_out(
        row_starts(train_users[rows], len(known)),
        train.items[rows],
        policy=validation if validation_items is None else "none",
        n_items=n_items,
        seed=seed,
    )
    seen = [train_users * n_items + train.items]
    seen += [np.flatnonzero(held != NO_ITEM) * n_items + held[held != NO_ITEM] for held in held_out.values()]
    pairs = np.unique(np.concatenate(seen))
    return Interactions(
        name=name,
        source=str(tables["path"].path),
        n_items=n_items,
        indptr=indptr,
        items=kept,
        validation=drawn if validation_items is None else validation_items,
        test=test,
        negatives=draw_negatives(
            name,
            row_starts(pairs // n_items, len(known)),
            pairs % n_items,
            n_items=n_items,
            seed=seed,
            n_negatives=n_negatives,
        ),
    )


def _one_per_user(table: RatingTable, users: NumberedIds, items: NumberedIds, field: str, known: IntArray) -> IntArray:
    """Return the item of each known user, [U], `NO_ITEM` where the table has no row."""
    who = users.numbers[field]
    if (unknown := np.flatnonzero(~np.isin(who, known))).size:
        raise UserError(
            f"{table.path}: user {users.ids[who[unknown[0]]]} has no training row, nor have the users of "
            f"{len(unknown)} of {len(who)} rows; remove these rows"
        )
    counts = np.bincount(who, minlength=len(users.ids))
    if counts.max(initial=0) > 1:
        user = int(np.argmax(counts))
        raise UserError(f"{table.path}: user {users.ids[user]} has {counts[user]} rows; keep one row for each user")
    held_out = np.full(len(known), NO_ITEM, dtype=np.int64)
    held_out[np.searchsorted(known, who)] = items.numbers[field]
    return held_out


LEAST_INTERACTIONS = 3
"""A test, a validation and a training item."""

_log = logging.getLogger(__name__)


class Ratings(DataSource, Section):
    """Interactions of users with items, one per row of a CSV or Parquet file; each user is a client.

    Ids are whole numbers or text. Each user's last item by `time` is its test item, the one before it its validation
    item, unless `test_path` gives the test items. A held-out item is ranked against `test_negatives` items, drawn once
    by `seed` from those that the user has no row of.
    """

    kind: Literal["ratings"] = "ratings"
    path: Path = Field(description="file of the ratings: .csv or .tsv, plain or compressed, or .parquet")
    user: str = Field("user", description="column of the users")
    item: str = Field("item", description="column of the items")
    time: str | None = Field(
        "timestamp", description="column of the times: numbers or ISO 8601 dates; null: rows are in order of time"
    )
    rating: str | None = Field(None, description="column of the ratings, which only min_rating reads")
    min_rating: float | None = Field(None, description="least rating that counts as an interaction; null: every row")
    header: bool = Field(True, description="whether a CSV file names its columns; if not, they are f0, f1, ...")
    delimiter: Delimiter = None
    encoding: Encoding = None
    decimal: Decimal = "."
    test_path: Path | None = Field(None, description="file of the same columns with one test item for every user")
    validation_path: Path | None = Field(
        None, description="file of the same columns with at most one validation item for a user; needs test_path"
    )
    validation: Validation = Field("second_last", description="choice of each user's validation item")
    min_interactions: int = Field(
        default=LEAST_INTERACTIONS, ge=2, description="users with fewer items are dropped; not with test_path"
    )
    test_negatives: int = Field(
        default=NEGATIVES, ge=1, le=10_000, description="number of items that a held-out item is ranked against"
    )
    seed: int | None = Field(
        None, ge=0, description="seed of the validation items and ranking negatives; null: that of the run"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.min_rating is None) != (self.rating is None):
            raise ValueError("min_rating and rating go together: the least rating, and the column of the ratings")
        if self.validation_path is not None and self.test_path is None:
            raise ValueError("validation_path needs test_path; give the test items too, or neither")
        if self.validation_path is not None and self.validation != "second_last":
            raise ValueError("validation_path has the validation items, so omit validation")
        if self.test_path is not None and self.min_interactions != LEAST_INTERACTIONS:
            raise ValueError("test_path fixes the users, so omit min_interactions")
        return self

    def load(self) -> Interactions:
        """Return the interactions; raise `UserError` if a file is missing or a row cannot be used."""
        paths = {"path": self.path, "validation_path": self.validation_path, "test_path": self.test_path}
        tables = {
            field: self._read(located(path, field), timed=field == "path")
            for field, path in paths.items()
            if path is not None
        }
        users, items = (NumberedIds.of(tables, field) for field in ("user", "item"))
        table = tables["path"]
        liked = np.ones(len(table), dtype=bool)
        if self.min_rating is not None:
            liked = table.numbers("rating") >= self.min_rating
            if not liked.any():
                raise UserError(f"{table.path}: no row has a rating of {self.min_rating:g} or more; lower min_rating")
        times = np.arange(len(table)) if self.time is None else table.times("time")
        events = Events(users.numbers["path"][liked], items.numbers["path"][liked], times[liked])
        name = self.path.name.removesuffix(".gz")
        name = name.rpartition(".")[0] or name
        if self.test_path is None:
            return self._leave_one_out(name, str(table.path), events)
        return given_split(
            name,
            tables,
            events,
            users,
            items,
            validation=self.validation,
            seed=self.seed or 0,
            n_negatives=self.test_negatives,
        )

    def _read(self, path: Path, *, timed: bool) -> RatingTable:
        names = {"user": self.user, "item": self.item}
        if timed and self.time is not None:
            names["time"] = self.time
        if timed and self.rating is not None:
            names["rating"] = self.rating
        return read_rating_table(path, names, Dialect(self.delimiter, self.header, self.encoding, self.decimal))

    def _leave_one_out(self, name: str, source: str, events: Events) -> Interactions:
        data = leave_one_out(
            name,
            source,
            events,
            validation=self.validation,
            min_interactions=self.min_interactions,
            seed=self.seed or 0,
            n_negatives=self.test_negatives,
        )
        n_users = len(np.unique(events.users))
        if data.n_users < n_users:
            _log.warning(
                "%s: %d of %d users have fewer than %d items (data.min_interactions) and are left out",
                name, n_users - data.n_users, n_users, self.min_interactions,
            )  # fmt: skip
        return data
