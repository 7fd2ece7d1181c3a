"""Partly observed matrices of users' values for items, with columns held by clients: from ratings, or from images."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from narrowcast.platform.config.files import Section
from narrowcast.platform.data.dataset import Dataset, DataSource
from narrowcast.platform.data.download import find, located
from narrowcast.platform.data.image_sets import MNIST, FashionMNIST
from narrowcast.platform.data.ncf import MOVIELENS
from narrowcast.platform.data.ncf import TRAIN as NCF_TRAIN
from narrowcast.platform.data.partition import Partition, Shards
from narrowcast.platform.data.ratings import NumberedIds, RatingTable, read_rating_table
from narrowcast.platform.data.scikit_learn import Digits
from narrowcast.platform.data.table_content import Decimal, Delimiter, Dialect, Encoding
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.client_contracts import ClientSplit
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import BoolArray, FloatArray, IntArray

TRAIN, VALIDATION, TEST = 0, 1, 2
"""The values of `RatingMatrix.split`."""
_SPLITS: Mapping[ClientSplit, int] = {"train": TRAIN, "validation": VALIDATION, "test": TEST}


class Entries(NamedTuple):
    """Entries of a matrix, all [m]."""

    users: IntArray
    items: IntArray
    values: FloatArray


class ClientEntries(NamedTuple):
    """The training entries client by client, within a client column by column, and the rows that each client has.

    Shapes: starts [U + 1], of the entries of each client; rows, columns and values [n], the row of an entry among those
    of its client, its column among those of its client, and its value; row_starts [U + 1] and items [R], the items of
    each client's rows, ascending; n_columns [U].
    """

    starts: IntArray
    rows: IntArray
    columns: IntArray
    values: FloatArray
    row_starts: IntArray
    items: IntArray
    n_columns: IntArray


@dataclass(frozen=True, eq=False)
class RatingMatrix(Dataset):
    """The observed entries of a matrix of `n_items` rows and one column for each of `n_users` users.

    The entries are in the order of users, and within a user in that of time or of the file. No pair of user and item
    occurs twice.

    Shapes: users, items, values and split [n]; owners [n_users], the client that holds each column; labels [n_users],
    the class of each column, None if columns have no classes. Clients are numbered from 0, and each has a column.
    """

    name: str
    source: str
    n_users: int
    n_items: int
    users: IntArray
    items: IntArray
    values: FloatArray
    split: NDArray[np.int8]
    owners: IntArray
    labels: IntArray | None = None

    @property
    def n_clients(self) -> int:
        """Number of clients, U."""
        return int(self.owners.max()) + 1

    @cached_property
    def examples(self) -> IntArray:
        """Number of training entries of every client, [U]."""
        return self.examples_of("train")

    def examples_of(self, split: ClientSplit) -> IntArray:
        """Return the number of each client's entries of a split, [U]."""
        return np.bincount(self.owners[self.part(split).users], minlength=self.n_clients)

    def part(self, split: ClientSplit) -> Entries:
        """Return the entries of a split, in the order of users."""
        chosen = self.split == _SPLITS[split]
        return Entries(self.users[chosen], self.items[chosen], self.values[chosen])

    @cached_property
    def training_mean(self) -> float:
        """The mean of the training values."""
        return float(self.part("train").values.mean())

    @property
    def training_range(self) -> tuple[float, float]:
        """The least and the largest training value."""
        values = self.part("train").values
        return float(values.min()), float(values.max())

    @cached_property
    def is_complete(self) -> bool:
        """True if every entry of the matrix is a training entry, and each column has its items in their order."""
        whole = len(self.users) == self.n_users * self.n_items and not self.split.any()
        return whole and bool((self.items == np.tile(np.arange(self.n_items), self.n_users)).all())

    @cached_property
    def places(self) -> IntArray:
        """The place of each column among those of its client, [n_users]."""
        order = np.argsort(self.owners, kind="stable")
        counts = np.bincount(self.owners, minlength=self.n_clients)
        positions = np.empty(self.n_users, dtype=np.int64)
        positions[order] = np.arange(self.n_users) - np.repeat(np.cumsum(counts) - counts, counts)
        return positions

    @cached_property
    def of_clients(self) -> ClientEntries:
        """The training entries client by client."""
        users, items, values = self.part("train")
        clients = self.owners[users]
        order = np.lexsort((users, clients))
        users, items, values, clients = users[order], items[order], values[order], clients[order]
        ends = np.arange(self.n_clients + 1)
        pairs, rows = np.unique(clients * self.n_items + items, return_inverse=True)
        row_starts = np.searchsorted(pairs, ends * self.n_items)
        return ClientEntries(
            np.searchsorted(clients, ends),
            rows - row_starts[clients],
            self.places[users],
            values,
            row_starts,
            pairs % self.n_items,
            np.bincount(self.owners, minlength=self.n_clients),
        )

    def shifted_values(self, offset: float, dtype: str) -> NDArray[Any]:
        """Return the values of `of_clients` less an offset, in a type; kept, since every round asks for them."""
        if (offset, dtype) not in self._shifted:
            self._shifted[offset, dtype] = (self.of_clients.values - offset).astype(dtype)
        return self._shifted[offset, dtype]

    @cached_property
    def _shifted(self) -> dict[tuple[float, str], NDArray[Any]]:
        return {}

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes shown in reports."""
        counts = np.bincount(self.split, minlength=3).tolist()
        return {
            "clients": self.n_clients,
            "users": self.n_users,
            "items": self.n_items,
            **{f"{name}_ratings": counts[code] for name, code in _SPLITS.items()},
        }

    @cached_property
    def digest(self) -> str:
        """The sha256 of all content that a run can observe."""
        hasher = hashlib.sha256(f"{self.name}\0{self.n_users}\0{self.n_items}".encode())
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                hasher.update(f"\0{field.name}\0{value.dtype.str}\0{value.shape}".encode())
                hasher.update(np.ascontiguousarray(value).data)
        return hasher.hexdigest()


MovieLens = Literal["ml-100k", "ml-1m", "ml-latest-small"]
_FIELDS = ("user", "item", "rating", "time")


class ExplicitRatings(DataSource, Section):
    """Users' ratings of items as a matrix of items by users, of which the given entries are observed.

    Ratings come from a MovieLens set or from a user's file, one rating per row. Each user is a client, or users
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
        users, items = (ids.numbers[""] for ids in numbered)
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


_SETS = {"digits": Digits, "mnist": MNIST, "fashion-mnist": FashionMNIST}


class SampleColumns(DataSource, Section):
    """The pixels of training images, 0 to 1, as the columns of a matrix of which every entry is observed.

    It is data of clustering by factorisation. Classes are never trained on: they tell how well clusters agree with
    them. By default each client has images of one class.
    """

    kind: Literal["sample_columns"] = "sample_columns"
    set: Literal["digits", "mnist", "fashion-mnist"] = Field("digits", description="data set of the images")
    columns: int | None = Field(None, ge=1, description="number of images, drawn at random; null: all for training")
    clients: int = Field(10, ge=1, description="number of clients")
    partition: Partition = Field(Shards(classes_per_client=1), description="distribution of the images across clients")
    seed: int | None = Field(
        None, ge=0, description="seed of the images drawn and of the partition; null: that of the run"
    )

    def load(self) -> RatingMatrix:
        """Return the matrix; raise `UserError` if the set is missing or the partition does not fit it."""
        samples = _SETS[self.set](validation_share=0.0, clients=1).load().train
        seed, count = self.seed or 0, len(samples) if self.columns is None else self.columns
        if count > len(samples):
            raise UserError(f"data.columns = {count}: {self.set} has {len(samples)} training images; use at most these")
        chosen = samples.take(np.sort(generator(seed, "columns").permutation(len(samples))[:count]))
        pixels = chosen.features.reshape(count, -1).astype(np.float64)
        if chosen.features.dtype == np.uint8:
            pixels /= 255
        order, indptr = self.partition.deal(chosen.labels, self.clients, seed)
        owners = np.empty(count, dtype=np.int64)
        owners[order] = np.repeat(np.arange(self.clients), np.diff(indptr))
        if (np.diff(indptr) == 0).any():
            raise UserError(f"data.clients = {self.clients}: a client has no image; use fewer clients")
        n_pixels = pixels.shape[1]
        return RatingMatrix(
            name=f"{self.set} columns",
            source=self.set,
            n_users=count,
            n_items=n_pixels,
            users=np.repeat(np.arange(count), n_pixels),
            items=np.tile(np.arange(n_pixels), count),
            values=pixels.ravel(),
            split=np.full(pixels.size, TRAIN, dtype=np.int8),
            owners=owners,
            labels=chosen.labels,
        )
