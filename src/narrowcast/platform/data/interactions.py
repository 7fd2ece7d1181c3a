"""Implicit-feedback interactions with one client per user, as flat arrays that are sliced without copying."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.client_contracts import ClientSplit
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import IntArray

NO_ITEM = -1
"""Marks a user without a validation item in `validation`."""


@dataclass(frozen=True)
class Interactions:
    """The interactions of U users with N items, split leave-last-one-out.

    Shapes:
        indptr: [U + 1]; user u's training items are `items[indptr[u]:indptr[u + 1]]`.
        items: [n]; ascending within a user, without repeats.
        validation, test: [U] held-out items (`NO_ITEM` if there is no validation item).
        negatives: [U, 99] fixed items against which the held-out item is ranked.
    """

    name: str
    source: str
    n_items: int
    indptr: IntArray
    items: IntArray
    validation: IntArray
    test: IntArray
    negatives: IntArray

    @property
    def n_users(self) -> int:
        """Number of users, equal to the number of clients."""
        return len(self.indptr) - 1

    @property
    def n_clients(self) -> int:
        """Number of clients, one per user."""
        return self.n_users

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes shown in reports."""
        return {"users": self.n_users, "items": self.n_items, "training_interactions": len(self.items)}

    @cached_property
    def examples(self) -> IntArray:
        """Number of training interactions of every user, [U]."""
        return np.diff(self.indptr)

    @cached_property
    def trained_items(self) -> NDArray[np.bool_]:
        """Return whether each item is a training item of any user, [N]."""
        return np.bincount(self.items, minlength=self.n_items) > 0

    def examples_of(self, split: ClientSplit) -> IntArray:
        """Return 1 for each user with a held-out item in a split, 0 for others, [U].

        Raise `UserError` for training items, which are not ranked against items that the user never interacted with.
        """
        if split == "train":
            raise UserError(f"{self.name} ranks held-out items alone; evaluate clients on validation or test")
        return ((self.test if split == "test" else self.validation) != NO_ITEM).astype(np.int64)

    @cached_property
    def digest(self) -> str:
        """The sha256 of all content that a run can observe."""
        hasher = hashlib.sha256(f"{self.name}\0{self.n_items}".encode())
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                hasher.update(f"\0{field.name}\0{value.shape}".encode())
                hasher.update(np.ascontiguousarray(value, dtype="<i8").tobytes())
        return hasher.hexdigest()


def row_starts(users: IntArray, n_users: int) -> IntArray:
    """Return where the rows of each user begin among rows in the order of users, [n_users + 1]."""
    return np.concatenate([[0], np.cumsum(np.bincount(users, minlength=n_users))])
