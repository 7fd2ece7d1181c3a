"""Implicit-feedback interactions with one client per user, as flat arrays that are sliced without copying.

Splits leave one item out: each user's last item is ranked against items that the user never interacted with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.data.dataset import Dataset
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.client_contracts import ClientSplit
from narrowcast.platform.types import IntArray

NO_ITEM = -1
"""Marks a user without a validation item in `validation`."""


@dataclass(frozen=True)
class Interactions(Dataset):
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


Validation = Literal["second_last", "random", "none"]
"""Choice of a user's validation item: the last training item by time, a seeded random one, or none."""

NEGATIVES = 99
"""Number of items against which a held-out item is ranked (He et al. 2017)."""


class Events(NamedTuple):
    """Interactions as flat arrays. Shapes: users, items and timestamps [n] each."""

    users: IntArray
    items: IntArray
    timestamps: IntArray


def leave_one_out(
    name: str,
    source: str,
    events: Events,
    *,
    validation: Validation,
    min_interactions: int = 20,
    seed: int = 0,
    n_negatives: int = NEGATIVES,
) -> Interactions:
    """Split interactions by time; of equal times the later row counts as later.

    Repeated (user, item) rows count once, at their last time. Users with fewer than `min_interactions` items are
    dropped; the remaining users and items are numbered by ascending original id.

    Raise `UserError` if no user has enough interactions, or a user leaves too few items to rank against.
    """
    rows = order_by_time(events)
    users, items = events.users[rows], events.items[rows]
    _, user_index, counts = np.unique(users, return_inverse=True, return_counts=True)
    enough = counts >= min_interactions
    if not enough.any():
        raise UserError(
            f"{name}: no user has {min_interactions} interactions (the most is {counts.max(initial=0)}); "
            "lower min_interactions"
        )
    kept = enough[user_index]
    item_ids, items = np.unique(items[kept], return_inverse=True)
    counts = counts[enough]
    ends = np.cumsum(counts)
    indptr = np.concatenate([[0], ends])
    train = np.ones(len(items), dtype=bool)
    train[ends - 1] = False
    train_indptr = indptr - np.arange(len(indptr))
    train_indptr, train_items, held_out = hold_out(
        train_indptr, items[train], policy=validation, n_items=len(item_ids), seed=seed
    )
    return Interactions(
        name=name,
        source=source,
        n_items=len(item_ids),
        indptr=train_indptr,
        items=train_items,
        validation=held_out,
        test=items[ends - 1],
        negatives=draw_negatives(name, indptr, items, n_items=len(item_ids), seed=seed, n_negatives=n_negatives),
    )


def order_by_time(events: Events) -> IntArray:
    """Return row numbers by user, then time, then row, with only the last of each repeated (user, item) pair."""
    users, items, timestamps = events
    by_pair = np.lexsort((timestamps, items, users))
    last = np.ones(len(by_pair), dtype=bool)
    last[:-1] = (np.diff(users[by_pair]) != 0) | (np.diff(items[by_pair]) != 0)
    rows = np.sort(by_pair[last])
    return rows[np.lexsort((timestamps[rows], users[rows]))]


def hold_out(
    indptr: IntArray, items: IntArray, *, policy: Validation, n_items: int, seed: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Remove one validation item per user from training items [n] that are in time order.

    Return the new indptr [U + 1], the remaining items, ascending within a user, and the validation items [U]. A user
    with fewer than two training items keeps them and has `NO_ITEM`.
    """
    counts = np.diff(indptr)
    held_out = np.full(len(counts), NO_ITEM, dtype=np.int64)
    left = np.ones(len(items), dtype=bool)
    if policy != "none":
        able = counts > 1
        # Jumped: the negatives use the stream of the same seed and must not depend on the policy.
        random = np.random.Generator(np.random.Philox(seed).jumped())
        offsets = counts - 1 if policy == "second_last" else random.integers(np.maximum(counts, 1))
        rows = (indptr[:-1] + offsets)[able]
        held_out[able] = items[rows]
        left[rows] = False
    users = np.repeat(np.arange(len(counts)), counts)[left]
    remaining = row_starts(users, len(counts))
    return remaining, np.sort(users * n_items + items[left]) % n_items, held_out


def draw_negatives(
    name: str, indptr: IntArray, items: IntArray, *, n_items: int, seed: int, n_negatives: int = NEGATIVES
) -> IntArray:
    """Draw [U, n_negatives] distinct items per user, uniformly from those not in `items[indptr[u]:indptr[u + 1]]`.

    Raise `UserError` if a user leaves fewer items.
    """
    free = n_items - np.diff(indptr)
    if (free < n_negatives).any():
        user = int(np.argmin(free))
        raise UserError(
            f"{name}: user {user} (numbered from 0) leaves {free[user]} of {n_items} items to rank against, but "
            f"{n_negatives} are needed; use a data set with more items, lower min_interactions to keep more items, "
            "or rank against fewer (test_negatives of data.kind = ratings)"
        )
    random = np.random.Generator(np.random.Philox(seed))
    negatives = np.empty((len(free), n_negatives), dtype=np.int64)
    for user, (start, end) in enumerate(pairwise(indptr)):
        untouched = np.ones(n_items, dtype=bool)
        untouched[items[start:end]] = False
        negatives[user] = random.choice(np.flatnonzero(untouched), n_negatives, replace=False)
    return negatives
