"""A partly observed matrix of users' values for items: entries as flat arrays, its columns held by clients."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.client_contracts import ClientSplit
from narrowcast.platform.types import FloatArray, IntArray

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
class RatingMatrix:
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
        places = np.empty(self.n_users, dtype=np.int64)
        places[order] = np.arange(self.n_users) - np.repeat(np.cumsum(counts) - counts, counts)
        return places

    @cached_property
    def of_clients(self) -> ClientEntries:
        """The training entries client by client."""
        users, items, values = self.part("train")
        clients = self.owners[users]
        order = np.lexsort((users, clients))
        users, items, values, clients = users[order], items[order], values[order], clients[order]
        ends = np.arange(self.n_clients + 1)
        pairs, places = np.unique(clients * self.n_items + items, return_inverse=True)
        row_starts = np.searchsorted(pairs, ends * self.n_items)
        return ClientEntries(
            np.searchsorted(clients, ends),
            places - row_starts[clients],
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
            **{f"{name}_ratings": counts[place] for name, place in _SPLITS.items()},
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
