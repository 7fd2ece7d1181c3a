"""Ratings with their stars, from MovieLens or from CSV or Parquet files, as a partly observed matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from narrowcast.platform.data.fetch import find
from narrowcast.platform.data.ncf import MOVIELENS
from narrowcast.platform.data.ncf import TRAIN as NCF_TRAIN
from narrowcast.platform.data.numbered_ids import NumberedIds
from narrowcast.platform.data.own_files import located
from narrowcast.platform.data.rating_matrix import TEST, TRAIN, VALIDATION, RatingMatrix
from narrowcast.platform.data.rating_table import RatingTable, read_rating_table
from narrowcast.platform.data.table_content import Decimal, Delimiter, Dialect, Encoding
from narrowcast.platform.errors import UserError
from narrowcast.platform.section import Section
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import BoolArray, IntArray

MovieLens = Literal["ml-100k", "ml-1m", "ml-latest-small"]
_FIELDS = ("user", "item", "rating", "time")


class ExplicitRatings(Section):
    """Users' ratings of items as a matrix of items by users, of which the given entries are observed.

    Ratings come from a MovieLens set or from a file of one's own, one rating per row. Each user is a client, or users
    are dealt at random to `clients`. `split: random` holds out shares of all ratings; `last` the last ratings of every
    user by time, of equal times the later rows.
    """

    kind: Literal["explicit_ratings"] = "explicit_ratings"
    set: MovieLens | None = Field(None, description="MovieLens set to read; null: the file of path")
    path: Path | None = Field(None, description="file of the ratings: .csv or .tsv, plain or compressed, or .parquet")
    user: str = Field("user", description="column of the users; with path")
    item: str = Field("item", description="column of the items; with path")
    rating: str = Field("rating", description="column of the ratings; with path")
    time: str | None = Field("timestamp", description="column of the times; null: rows are in order of time; with path")
    header: bool = Field(True, description="whether a CSV file names its columns; if not, they are f0, f1, ...")
    delimiter: Delimiter = None
    encoding: Encoding = None
    decimal: Decimal = "."
    first_users: int | None = Field(None, ge=1, description="number of users kept, by ascending id; null: all")
    top_items: int | None = Field(
        None, ge=1, description="number of items kept, those with the most ratings; null: all"
    )
    min_ratings: int = Field(1, ge=1, description="users with fewer ratings of the kept items are dropped")
    split: Literal["random", "last"] = Field(
        "random", description="held-out ratings: a random share of all, or the last ones of each user"
    )
    test_share: float = Field(0.2, ge=0, lt=1, description="share of the ratings for testing; with split = random")
    validation_share: float = Field(
        0.0, ge=0, lt=1, description="share of the ratings for validation; with split = random"
    )
    test_last: int = Field(1, ge=0, description="ratings of each user for testing; with split = last")
    validation_last: int = Field(
        0, ge=0, description="ratings of each user for validation, before those for testing; with split = last"
    )
    clients: int | None = Field(
        None, ge=1, description="number of clients, to which users are dealt in equal numbers; null: one per user"
    )
    seed: int | None = Field(
        None, ge=0, description="seed of the random split and of the clients of users; null: that of the run"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.set is None) == (self.path is None):
            raise ValueError("give either set, a MovieLens set, or path, a file of ratings")
        if self.test_share + self.validation_share >= 1:
            raise ValueError("test_share and validation_share leave no training ratings; use less than 1 in all")
        return self

    def load(self) -> RatingMatrix:
        """Return the matrix; raise `UserError` if a file is missing or a row cannot be used."""
        table = self._table()
        numbered = [NumberedIds.of({"": table}, field) for field in ("user", "item")]
        users, items = (each.numbers[""] for each in numbered)
        values = table.numbers("rating")
        if not len(values):
            raise UserError(f"{table.path}: has no ratings; give a file with some")
        self._refuse_repeats(table, users, items, numbered)
        times = np.arange(len(values)) if "time" not in table.names else table.times("time")
        kept_items = self._kept_items(items)
        rows = np.flatnonzero(self._kept(users, items, kept_items))
        rows = rows[np.lexsort((rows, times[rows], users[rows]))]
        users, items = np.unique(users[rows], return_inverse=True)[1], np.searchsorted(kept_items, items[rows])
        n_users, split = int(users.max()) + 1, self._split(users)
        if (split != TRAIN).all():
            raise UserError(f"{table.path}: no rating is left for training; hold out fewer ratings (data.split)")
        return RatingMatrix(
            name=str(self.set or (self.path and self.path.name)),
            source=str(table.path),
            n_users=n_users,
            n_items=len(kept_items),
            users=users,
            items=items,
            values=values[rows],
            split=split,
            owners=self._owners(n_users),
        )

    def _table(self) -> RatingTable:
        if self.path is not None:
            names = {field: getattr(self, field) for field in _FIELDS if getattr(self, field) is not None}
            dialect = Dialect(self.delimiter, self.header, self.encoding, self.decimal)
            return read_rating_table(located(self.path, "path"), names, dialect)
        if self.set == "ml-latest-small":
            return _read(find(self.set, ("ratings.csv",)) / "ratings.csv")
        if self.set == "ml-100k":
            folder = find(self.set, ("ml-100k.inter", "u.data"))
            recbole = folder / "ml-100k.inter"
            return _read(recbole if recbole.is_file() else folder / "u.data")
        folder = find("ml-1m", ("ratings.dat", f"ml-1m{NCF_TRAIN}", f"ml-1m{NCF_TRAIN}.gz"))
        if not (folder / "ratings.dat").is_file():
            raise UserError(
                f"data.set = ml-1m: {folder} has NCF's files, which hold no stars; move the folder away and run: "
                "narrowcast data fetch ml-1m"
            )
        return _read(folder / "ratings.dat")

    def _refuse_repeats(self, table: RatingTable, users: IntArray, items: IntArray, ids: list[NumberedIds]) -> None:
        pairs = users * (int(items.max()) + 1) + items
        _, first, counts = np.unique(pairs, return_index=True, return_counts=True)
        if (repeats := first[counts > 1]).size:
            row = int(repeats.min())
            user, item = ids[0].ids[users[row]], ids[1].ids[items[row]]
            others = f", and {len(repeats) - 1} other pairs" if len(repeats) > 1 else ""
            raise UserError(
                f"{table.path}: user {user} has several ratings of item {item}, the first in row "
                f"{row + table.first_row}{others}; keep one of them"
            )

    def _kept_items(self, items: IntArray) -> IntArray:
        """Return the items with the most ratings, of equal numbers those that come first; ascending."""
        ids, first, counts = np.unique(items, return_index=True, return_counts=True)
        return np.sort(ids[np.lexsort((first, -counts))[: self.top_items]])

    def _kept(self, users: IntArray, items: IntArray, kept_items: IntArray) -> BoolArray:
        """Return the rows that the chosen users and items leave, [n]; raise `UserError` for none."""
        kept = np.isin(items, kept_items) & (True if self.first_users is None else users < self.first_users)
        kept &= np.bincount(users[kept], minlength=int(users.max()) + 1)[users] >= self.min_ratings
        if not kept.any():
            raise UserError(f"no user has {self.min_ratings} ratings of the kept items; lower data.min_ratings")
        return np.asarray(kept)

    def _split(self, users: IntArray) -> NDArray[np.int8]:
        """Return the split of each rating [n], which are in the order of users and times."""
        split = np.full(len(users), TRAIN, dtype=np.int8)
        if self.split == "random":
            order = generator(self.seed or 0, "ratings").permutation(len(users))
            tests = round(self.test_share * len(users))
            split[order[:tests]] = TEST
            split[order[tests : tests + round(self.validation_share * len(users))]] = VALIDATION
            return split
        ends = np.cumsum(np.bincount(users))
        left = ends[users] - np.arange(len(users))  # 1 for the last rating of a user
        split[left <= self.test_last + self.validation_last] = VALIDATION
        split[left <= self.test_last] = TEST
        return split

    def _owners(self, n_users: int) -> IntArray:
        if self.clients is None:
            return np.arange(n_users)
        if self.clients > n_users:
            raise UserError(f"data.clients = {self.clients}: there are {n_users} users; use at most as many clients")
        return generator(self.seed or 0, "clients of users").permutation(np.arange(n_users) * self.clients // n_users)


def _read(path: Path) -> RatingTable:
    layout = MOVIELENS[path.name]
    names = dict(zip(_FIELDS, layout.columns, strict=True))
    return read_rating_table(path, names, Dialect(layout.delimiter, layout.header))
