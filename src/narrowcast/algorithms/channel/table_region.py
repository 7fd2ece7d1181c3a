"""Rate regions given as a table with a capacity for every set of users."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from narrowcast.algorithms.channel.regions import TOLERANCE
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import BoolArray, FloatArray, IntArray

MOST_USERS = 12
"""Limit on the users of a table: it has 2**n - 1 entries, and every query looks at all of them."""


@dataclass(frozen=True)
class TableRegion:
    """R(S) for every set S of n <= 12 users, eq. (7) of the wireless report, where R(S) = d log2 K(S) per model sent.

    Shapes: capacity [2**n], bits per second; entry m belongs to the set whose members are the bits of m, entry 0 is 0.
    Made by `of`, which refuses tables that are not polymatroids.
    """

    ordered: ClassVar[bool] = False
    capacity: FloatArray

    @classmethod
    def of(cls, table: Mapping[tuple[int, ...], float]) -> TableRegion:
        """Read {set of users: R(set)} for the users 0 .. n-1 and every set but the empty one.

        Raise `UserError` for a table that is incomplete or not a polymatroid, naming the sets.
        """
        entries = {frozenset(users): float(rate) for users, rate in table.items()}
        n_users = 1 + max((user for users in entries for user in users), default=-1)
        if not 1 <= n_users <= MOST_USERS:
            raise UserError(f"a K(S) table is for 1 to {MOST_USERS} users, numbered from 0; got {n_users}")
        capacity = np.full(2**n_users, np.nan)
        capacity[0] = entries.pop(frozenset(), 0.0)
        for users, rate in entries.items():
            if min(users) < 0:
                raise UserError(f"K(S) table: users count from 0; got {name_of(sorted(users))}")
            capacity[sum(1 << user for user in users)] = rate
        _check(capacity)
        return cls(capacity)

    def __len__(self) -> int:
        return len(self.capacity).bit_length() - 1

    def capacity_of(self, users: IntArray) -> float:
        """Return R(users)."""
        return float(self.capacity[_mask_of(users)])

    def single_rates(self) -> FloatArray:
        """Return R({u}), [n]."""
        return self.capacity[1 << np.arange(len(self))]

    def most_violated(self, rates: FloatArray) -> tuple[float, BoolArray]:
        """Return the largest excess and its set, from all sets."""
        members = self._members()
        excess = members @ rates - self.capacity
        worst = int(excess.argmax())
        if excess[worst] <= 0:
            return 0.0, np.zeros(len(rates), dtype=bool)
        return float(excess[worst]), members[worst]

    def slack(self, rates: FloatArray) -> tuple[FloatArray, BoolArray]:
        """Return the least slack of a set that contains each user, [n], and that set, [n, n]."""
        members = self._members()
        slack = self.capacity - members @ rates
        with_user = np.where(members, slack[:, None], np.inf)
        return with_user.min(axis=0), members[with_user.argmin(axis=0)]

    def take(self, users: IntArray) -> TableRegion:
        """Return the table of some of the users, renumbered."""
        return TableRegion(self.capacity[_masks_of_sets(users)])

    def contracted(self, users: IntArray) -> TableRegion:
        """Return the table of the other users given that these send at capacity."""
        spent = _mask_of(users)
        others = np.setdiff1d(np.arange(len(self)), users)
        return TableRegion(self.capacity[_masks_of_sets(others) | spent] - self.capacity[spent])

    def _members(self) -> BoolArray:
        """Return the members of each set, as masks [2**n, n]."""
        return (np.arange(len(self.capacity))[:, None] >> np.arange(len(self)) & 1).astype(bool)


def _check(capacity: FloatArray) -> None:
    n_users = len(capacity).bit_length() - 1
    masks = np.arange(len(capacity))
    if (absent := np.flatnonzero(np.isnan(capacity))).size:
        raise UserError(f"K(S) table: no number for {_name(absent[0])}; every set of the {n_users} users needs one")
    if not np.isfinite(capacity).all() or capacity[0] != 0:
        bad = masks[~np.isfinite(capacity)][0] if not np.isfinite(capacity).all() else 0
        allowed = "0, or left out" if bad == 0 else "finite"
        raise UserError(f"K(S) table: R{_name(bad)} = {capacity[bad]:g}; it must be {allowed}")
    slack = TOLERANCE * np.abs(capacity).max()
    for first in range(n_users):
        without = masks[~masks >> first & 1 == 1]
        more = without | 1 << first
        if (falls := capacity[more] < capacity[without] - slack).any():
            at = without[falls][0]
            raise UserError(
                f"K(S) table is not monotone: R{_name(at | 1 << first)} = {capacity[at | 1 << first]:g} is below "
                f"R{_name(at)} = {capacity[at]:g}; a larger set must carry at least as much"
            )
        for second in range(first):
            base = without[~without >> second & 1 == 1]
            a, b, both = base | 1 << second, base | 1 << first, base | 1 << first | 1 << second
            if (grows := capacity[a] + capacity[b] < capacity[both] + capacity[base] - slack).any():
                at = np.flatnonzero(grows)[0]
                raise UserError(
                    f"K(S) table is not submodular: R{_name(a[at])} + R{_name(b[at])} = "
                    f"{capacity[a[at]] + capacity[b[at]]:g} is below R{_name(both[at])} + R{_name(base[at])} = "
                    f"{capacity[both[at]] + capacity[base[at]]:g}; lower the latter"
                )


def name_of(users: Iterable[int]) -> str:
    """Return the notation of a set of users: {0, 2}."""
    return "{" + ", ".join(str(user) for user in users) + "}"


def _name(mask: int | np.int64) -> str:
    return name_of(user for user in range(MOST_USERS) if int(mask) >> user & 1)


def _masks_of_sets(users: IntArray) -> IntArray:
    """Return the masks of all sets of m users, in the order of the users' own numbering, [2**m]."""
    masks = np.zeros(1, dtype=np.int64)
    for user in users.tolist():
        masks = np.concatenate([masks, masks | 1 << user])
    return masks


def _mask_of(users: IntArray) -> int:
    return sum(1 << user for user in users.tolist())
