"""The file layout of Neural Collaborative Filtering (He et al. 2017), with fixed test items and negatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv
from pydantic import Field

from narrowcast.platform.config.files import Section
from narrowcast.platform.data.dataset import DataSource
from narrowcast.platform.data.interactions import (
    NEGATIVES,
    Events,
    Interactions,
    Validation,
    hold_out,
    order_by_time,
    row_starts,
)
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import IntArray

TRAIN, TEST, NEGATIVE = ".train.rating", ".test.rating", ".test.negative"
RATING_COLUMNS = ("f0", "f1", "f3")
"""Columns of user, item and timestamp in tab-separated rows of user, item, rating, timestamp."""
_MOST_ITEMS = 10**8


@dataclass(frozen=True)
class Layout:
    """Layout of a file of ratings: its columns of user, item, rating and time, their delimiter, and its header."""

    columns: tuple[str, str, str, str]
    delimiter: str
    header: bool


MOVIELENS = {
    "ml-100k.inter": Layout(("user_id:token", "item_id:token", "rating:float", "timestamp:float"), "\t", header=True),
    "u.data": Layout(("f0", "f1", "f2", "f3"), "\t", header=False),
    "ratings.dat": Layout(("f0", "f2", "f4", "f6"), ":", header=False),  # separated by two colons
    "ratings.csv": Layout(("userId", "movieId", "rating", "timestamp"), ",", header=True),
}
"""The layouts of GroupLens' files and of RecBole's, by their names."""


class NCF(DataSource, Section):
    """User data in NCF's files: `PATH.train.rating`, `PATH.test.rating` and `PATH.test.negative`, plain or gzipped."""

    kind: Literal["ncf"] = "ncf"
    path: Path = Field(description="common prefix of the three files, without .train.rating")
    validation: Validation = Field("random", description="choice of each user's validation item")
    seed: int | None = Field(None, ge=0, description="seed of a random validation item; null: that of the run")

    def load(self) -> Interactions:
        """Return the interactions with the ids and negatives of the files; raise `UserError` that names a bad file."""
        return read_ncf(self.path.name, self.path, validation=self.validation, seed=self.seed or 0)


def read_ncf(name: str, prefix: Path, *, validation: Validation, seed: int) -> Interactions:
    """Read the three files at `prefix`; ids and the 99 negatives of every user stay as given.

    The published negatives are kept even if one is the user's own test item (156 users of ml-1m); a test item never
    stays in training. Raise `UserError` if a file is missing or malformed, the files disagree, or `validation` is
    "second_last" and the files have no times.
    """
    train, test, negative = (_existing(prefix, suffix) for suffix in (TRAIN, TEST, NEGATIVE))
    users, items, times = read_columns(train, RATING_COLUMNS, delimiter="\t", optional=("f3",))
    test_users, test_items = read_columns(test, RATING_COLUMNS[:2], delimiter="\t")
    pairs, negatives = _read_negatives(negative)
    n_users = len(test_users)
    if not np.array_equal(np.sort(test_users), np.arange(n_users)):
        raise UserError(f"{test}: expected one row for each user 0 to {n_users - 1}; renumber the users")
    if not np.array_equal(pairs, np.column_stack([test_users, test_items])):
        raise UserError(f"{negative}: its (user,item) pairs differ from the rows of {test.name}; download both again")
    if len(users) == 0 or users.min() < 0 or users.max() >= n_users:
        raise UserError(f"{train}: expected users 0 to {n_users - 1}, as in {test.name}; download both again")
    if min(items.min(), test_items.min(), negatives.min()) < 0:
        raise UserError(f"{prefix}: an item id is negative; number the items from 0")
    if validation == "second_last" and np.ptp(times) == 0:
        raise UserError(f'{train}: has no times, so validation cannot be "second_last"; use "random" or "none"')
    n_items = 1 + int(max(items.max(), test_items.max(), negatives.max()))
    if n_items > _MOST_ITEMS:
        raise UserError(f"{prefix}: has the item {n_items - 1}; number the items from 0, up to {_MOST_ITEMS - 1}")
    by_user = np.argsort(test_users)
    test_items, negatives = test_items[by_user], negatives[by_user]
    rows = order_by_time(Events(users, items, times))
    rows = rows[items[rows] != test_items[users[rows]]]
    indptr = row_starts(users[rows], n_users)
    indptr, items, held_out = hold_out(indptr, items[rows], policy=validation, n_items=n_items, seed=seed)
    return Interactions(
        name=name,
        source=str(train),
        n_items=n_items,
        indptr=indptr,
        items=items,
        validation=held_out,
        test=test_items,
        negatives=negatives,
    )


def write_ncf_train(ratings: Path, test: Path, train: Path) -> None:
    """Write NCF's training file from MovieLens' `ratings.dat` and NCF's test file, with rows in the same order.

    Raise `UserError` if the test file does not belong to these ratings.
    """
    layout = MOVIELENS["ratings.dat"]
    users, movies, stars, times = read_columns(ratings, layout.columns, delimiter=layout.delimiter)
    test_users, test_items = read_columns(test, RATING_COLUMNS[:2], delimiter="\t")
    # NCF numbers items by first appearance in ratings.dat and users from 0.
    _, first, inverse = np.unique(movies, return_index=True, return_inverse=True)
    items = np.argsort(np.argsort(first))[inverse]
    users = users - 1
    held_out = np.full(users.max() + 1, -1)
    if not np.array_equal(test_users, np.arange(len(held_out))):
        raise UserError(f"{test}: expected one row for each user 0 to {len(held_out) - 1} of {ratings.name}")
    held_out[test_users] = test_items
    kept = items != held_out[users]
    if np.count_nonzero(~kept) != len(held_out):
        raise UserError(f"{test}: a test item is not among its user's ratings in {ratings}; download both again")
    table = pa.table([column[kept] for column in (users, items, stars, times)], names=["u", "i", "r", "t"])
    csv.write_csv(table, train, csv.WriteOptions(include_header=False, delimiter="\t"))


def is_ncf(prefix: Path) -> bool:
    """Return whether all three files exist, plain or gzipped."""
    return all(any(path.is_file() for path in _spellings(prefix, end)) for end in (TRAIN, TEST, NEGATIVE))


def read_columns(
    path: Path, columns: Sequence[str], *, delimiter: str, header: bool = False, optional: Sequence[str] = ()
) -> list[IntArray]:
    """Read integer columns [n] of a delimited file by header name, or as f0, f1, ... if it has no header.

    Gzipped files are decompressed; a missing optional column reads as zeros. Raise `UserError` if the file cannot be
    read, lacks a column or holds a value that is not an integer.
    """
    convert = csv.ConvertOptions(
        column_types=dict.fromkeys(columns, pa.int64()),
        include_columns=columns,
        include_missing_columns=True,
        null_values=[],
    )
    table = _read(path, delimiter, convert, header=header)
    for name in columns:
        if table[name].null_count and name not in optional:
            kind = f"a header with {', '.join(columns)}" if header else f"at least {len(columns)} columns"
            raise UserError(f"{path}: expected {kind}, separated by {delimiter!r}; download the file again")
    return [pc.fill_null(table[name], 0).to_numpy() for name in columns]


def _read_negatives(path: Path) -> tuple[IntArray, IntArray]:
    """Return the (user, item) pairs [U, 2] and negatives [U, 99] of rows such as `(0,25)`, 1064, 174, ..."""
    names = [f"f{column}" for column in range(1, NEGATIVES + 1)]
    types = {"f0": pa.string()} | dict.fromkeys(names, pa.int64())
    table = _read(path, "\t", csv.ConvertOptions(column_types=types, null_values=[]), header=False)
    if table.num_columns != NEGATIVES + 1:
        raise UserError(
            f"{path}: has {table.num_columns - 1} negatives per user, but the protocol needs {NEGATIVES}; "
            f"write {NEGATIVES} negatives per user"
        )
    parts = pc.extract_regex(table["f0"], r"^\((?P<user>\d+),(?P<item>\d+)\)$")
    if parts.null_count:
        raise UserError(f"{path}: expected every row to begin with (user,item); download the file again")
    pairs = [pc.struct_field(parts, side).cast(pa.int64()).to_numpy() for side in ("user", "item")]
    return np.column_stack(pairs), np.column_stack([table[name].to_numpy() for name in names])


def _read(path: Path, delimiter: str, convert: csv.ConvertOptions, *, header: bool) -> pa.Table:
    try:
        return csv.read_csv(
            path,
            read_options=csv.ReadOptions(autogenerate_column_names=not header),
            parse_options=csv.ParseOptions(delimiter=delimiter, quote_char=False),
            convert_options=convert,
        )
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: {str(error).splitlines()[0]}; download the file again") from error


def _spellings(prefix: Path, suffix: str) -> tuple[Path, Path]:
    return prefix.with_name(prefix.name + suffix), prefix.with_name(prefix.name + suffix + ".gz")


def _existing(prefix: Path, suffix: str) -> Path:
    paths = _spellings(prefix, suffix)
    for path in paths:
        if path.is_file():
            return path
    raise UserError(f"{paths[0]} (or {paths[1].name}) does not exist; give the path without {suffix}")
