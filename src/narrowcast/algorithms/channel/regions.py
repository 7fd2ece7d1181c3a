"""Rate regions: the rates that the clients of a round can have together, in bits per second.

A region is the polymatroid {r >= 0 : the sum of r over S is at most R(S), for every set S of users}, with R monotone,
submodular and 0 for the empty set (Cover and Thomas, chapter 15; Tse and Hanly, IEEE IT 44(7), 1998). Users are indices
in a cohort.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol, Self

import numpy as np

from narrowcast.platform.compiled import compiled, read_only
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import BoolArray, FloatArray, IntArray

TOLERANCE = 1e-9
"""Relative tolerance of capacities, which are sums of logarithms; far below the accuracy of any SNR."""


class Region(Protocol):
    """A polymatroid of rates over n users."""

    ordered: ClassVar[bool]
    """True if the order of users by capacity is the same alone and given any set of other users."""

    def __len__(self) -> int:
        """Return the number of users."""
        ...

    def capacity_of(self, users: IntArray) -> float:
        """Return R(users)."""
        ...

    def single_rates(self) -> FloatArray:
        """Return R({u}) of each user, [n]: its rate while all others are silent."""
        ...

    def most_violated(self, rates: FloatArray) -> tuple[float, BoolArray]:
        """Return the largest excess of `rates` [n] over R(S), and its S as a mask [n].

        The excess is 0 and the set empty if no constraint is violated.
        """
        ...

    def slack(self, rates: FloatArray) -> tuple[FloatArray, BoolArray]:
        """Return how far each user's rate could rise with the others fixed, [n], and the set that limits it, [n, n].

        Shapes: rates [n]. Slack is negative outside of the region; row u of the sets is a mask that contains u.
        """
        ...

    def take(self, users: IntArray) -> Self:
        """Return the region of some of the users, with the others silent (the restriction)."""
        ...

    def contracted(self, users: IntArray) -> Self:
        """Return the region of the other users given that these send at capacity: R(S + users) - R(users)."""
        ...


def overloaded(region: Region, rates: FloatArray, tolerance: float = TOLERANCE) -> BoolArray:
    """Return the most violated set of users as a mask [n]; empty if none exceeds its capacity by more than `tolerance`.

    The tolerance is relative to the set's own capacity, not to the region's.
    """
    return region.most_violated(rates * (1 - tolerance))[1]


def contains(region: Region, rates: FloatArray) -> bool:
    """Return whether the rates [n] are in the region, up to `TOLERANCE` of the capacity of each set."""
    return bool((rates >= 0).all()) and not overloaded(region, rates).any()


def undecodable(region: Region, rates: FloatArray) -> BoolArray:
    """Return the users whose messages cannot be decoded at these rates [n], as a mask; rate 0 stands for a silent user.

    The others are the largest set that a joint decoder recovers with the lost signals as noise: individual outages of
    Li, Jindal and Goldsmith, IEEE IT 51(4), 2005. The smallest of the most violated sets shares no user with any
    decodable set, since each of its parts exceeds what is left for it beside the rest of that set; so it is lost as a
    whole, and the same holds for the remaining users given its noise.
    """
    lost = np.zeros(len(rates), dtype=bool)
    heard = np.flatnonzero(rates > 0)
    left = region.take(heard) if len(heard) else region
    while len(heard):
        over = overloaded(left, rates[heard])
        if not over.any():
            break
        lost[heard[over]] = True
        heard = heard[~over]
        if len(heard):
            left = left.contracted(np.flatnonzero(over))
    return lost


@dataclass(frozen=True)
class Independent:
    """Links without interference: R(S) is the sum of the users' own rates.

    Shapes: rates [n], bits per second, finite and not negative; other values raise `UserError`.
    """

    ordered: ClassVar[bool] = True
    rates: FloatArray

    def __post_init__(self) -> None:
        check_users(self.rates, "rate", "bits per second")

    def __len__(self) -> int:
        return len(self.rates)

    def capacity_of(self, users: IntArray) -> float:
        """Return the sum of the users' rates."""
        return float(self.rates[users].sum())

    def single_rates(self) -> FloatArray:
        """Return each user's rate, [n]."""
        return self.rates

    def most_violated(self, rates: FloatArray) -> tuple[float, BoolArray]:
        """Return the users above their own rate, and their total excess."""
        over = rates - self.rates
        return float(over[over > 0].sum()), over > 0

    def slack(self, rates: FloatArray) -> tuple[FloatArray, BoolArray]:
        """Return each user's remaining rate less the excess of the others, [n], and the limiting sets, [n, n]."""
        slack = self.rates - rates
        over = np.minimum(slack, 0.0)
        return slack + over.sum() - over, np.eye(len(rates), dtype=bool) | (over < 0)

    def take(self, users: IntArray) -> Independent:
        """Return the region of these links."""
        return Independent(self.rates[users])

    def contracted(self, users: IntArray) -> Independent:
        """Return the region of the other links."""
        return Independent(np.delete(self.rates, users))


@dataclass(frozen=True)
class GaussianRegion:
    """The Gaussian multiple-access channel: R(S) = B log2(1 + the sum of the SNRs over S / noise).

    Shapes: snr [n], linear, finite and not negative; bandwidth in hertz, above 0. Other values raise
    `UserError`. The noise is 1 plus the SNR of contracted users: users that send at capacity are noise to the others.

    Since R is a concave function of a sum, the most violated set consists of the users with the highest rate / snr: one
    sort and one pass over the prefixes find it, in O(n log n).
    """

    ordered: ClassVar[bool] = True
    snr: FloatArray
    bandwidth: float
    noise: float = 1.0

    def __post_init__(self) -> None:
        check_users(self.snr, "SNR", "a power ratio, not decibel")
        if not (np.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise UserError(f"bandwidth = {self.bandwidth} Hz; it must be finite and above 0")

    def __len__(self) -> int:
        return len(self.snr)

    def capacity_of(self, users: IntArray) -> float:
        """Return B log2(1 + snr(users) / noise)."""
        return float(self._of_power(self.snr[users].sum()))

    def single_rates(self) -> FloatArray:
        """Return B log2(1 + snr / noise), [n]."""
        return self._of_power(self.snr)

    def most_violated(self, rates: FloatArray) -> tuple[float, BoolArray]:
        """Return the prefix of largest excess, by decreasing rate / snr."""
        mask = np.zeros(len(rates), dtype=bool)
        excess, last, order = _worst_prefix(
            read_only(rates, np.float64), read_only(self.snr, np.float64), self.noise, float(self.bandwidth)
        )
        mask[order[: last + 1]] = True
        return excess, mask

    def slack(self, rates: FloatArray) -> tuple[FloatArray, BoolArray]:
        """Return the least slack of a prefix, by decreasing rate / snr, with the user added; and that set. O(n^2)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            price = np.where(rates > 0, rates / self.snr, -1.0)
        order = np.argsort(-price, kind="stable")
        rank = np.argsort(order)  # of each user
        snr, rate = (np.concatenate([[0.0], np.cumsum(values[order])]) for values in (self.snr, rates))
        added = np.arange(len(rates) + 1) <= rank[:, None]  # [user, prefix]: the user is not in that prefix yet
        power = snr + added * self.snr[:, None]
        slack = self._of_power(power) - rate - added * rates[:, None]
        limit = slack.argmin(axis=1)
        return slack.min(axis=1), (rank < limit[:, None]) | np.eye(len(rates), dtype=bool)

    def take(self, users: IntArray) -> GaussianRegion:
        """Return the same band with fewer users."""
        return GaussianRegion(self.snr[users], self.bandwidth, self.noise)

    def contracted(self, users: IntArray) -> GaussianRegion:
        """Return the same band with these users as noise."""
        return GaussianRegion(np.delete(self.snr, users), self.bandwidth, self.noise + float(self.snr[users].sum()))

    def _of_power(self, power: FloatArray) -> FloatArray:
        return self.bandwidth * np.log1p(power / self.noise) / np.log(2)


def check_users(values: FloatArray, name: str, unit: str) -> None:
    """Raise `UserError` unless there is at least one user, and every value [n] is finite and not negative."""
    if not len(values):
        raise UserError(f"a rate region needs at least one user, and its {name}; got none")
    if (bad := np.flatnonzero(~(np.isfinite(values) & (values >= 0)))).size:
        raise UserError(f"user {bad[0]}: {name} = {values[bad[0]]}; it must be finite and not negative ({unit})")


@compiled()
def _worst_prefix(rates: FloatArray, snr: FloatArray, noise: float, bandwidth: float) -> tuple[float, int, IntArray]:
    """Return the largest excess of a prefix by decreasing rate / snr, its last position or -1, and the order."""
    price = np.empty(len(rates))
    for user in range(len(rates)):
        price[user] = -rates[user] / snr[user] if rates[user] > 0 else 0.0  # without signal: -infinity, so first
    order = np.argsort(price, kind="mergesort")
    worst, last, rate, power = 0.0, -1, 0.0, 0.0
    for index in range(len(order)):
        rate += rates[order[index]]
        power += snr[order[index]]
        excess = rate - bandwidth * np.log1p(power / noise) / np.log(2)
        if excess > worst:
            worst, last = excess, index
    return worst, last, order


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
        remaining = np.setdiff1d(np.arange(len(self)), users)
        return TableRegion(self.capacity[_masks_of_sets(remaining) | spent] - self.capacity[spent])

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
            a, b, union = base | 1 << second, base | 1 << first, base | 1 << first | 1 << second
            if (grows := capacity[a] + capacity[b] < capacity[union] + capacity[base] - slack).any():
                at = np.flatnonzero(grows)[0]
                raise UserError(
                    f"K(S) table is not submodular: R{_name(a[at])} + R{_name(b[at])} = "
                    f"{capacity[a[at]] + capacity[b[at]]:g} is below R{_name(union[at])} + R{_name(base[at])} = "
                    f"{capacity[union[at]] + capacity[base[at]]:g}; lower the latter"
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


@dataclass(frozen=True)
class InterferenceRegion:
    """The rate B log2(1 + own / (1 + interference)) of each user, where all users send all the time.

    A receiver takes the other users of its band as noise.

    Shapes: gains [n, n], power over noise of user j at the receiver of user i, with the own signal on the diagonal;
    bands [n]; bandwidth of a band in hertz; `outside` [n], the power of senders that are not users, None: 0. `take`
    leaves users out, who are silent then, so that the others' rates rise; unlike in a multiple-access channel, no rate
    can be traded for another.
    """

    ordered: ClassVar[bool] = True
    gains: FloatArray
    bands: IntArray
    bandwidth: float
    outside: FloatArray | None = None

    def __post_init__(self) -> None:
        check_users(np.diag(self.gains), "SNR", "a power ratio, not decibel")

    def __len__(self) -> int:
        return len(self.bands)

    @cached_property
    def rates(self) -> FloatArray:
        """The rate of each user among all the others, [n], in bits per second."""
        signal = np.diag(self.gains)
        heard = self._heard(np.arange(len(self))) - signal
        return np.asarray(self.bandwidth * np.log1p(signal / (1 + heard)) / np.log(2))

    @property
    def _links(self) -> Independent:
        return Independent(self.rates)

    def capacity_of(self, users: IntArray) -> float:
        """Return the sum of the users' rates among all."""
        return self._links.capacity_of(users)

    def single_rates(self) -> FloatArray:
        """Return each user's rate among all the others, [n]."""
        return self.rates

    def most_violated(self, rates: FloatArray) -> tuple[float, BoolArray]:
        """Return the users above their own rate, and their total excess."""
        return self._links.most_violated(rates)

    def slack(self, rates: FloatArray) -> tuple[FloatArray, BoolArray]:
        """Return each user's remaining rate less the excess of the others, [n], and the limiting sets, [n, n]."""
        return self._links.slack(rates)

    def take(self, users: IntArray) -> InterferenceRegion:
        """Return the region of these users, the others silent."""
        return self._part(users, self.outside)

    def contracted(self, users: IntArray) -> InterferenceRegion:
        """Return the region of the other users, whom these users disturb as before."""
        return self._part(np.delete(np.arange(len(self)), users), self._heard(users))

    def _part(self, users: IntArray, outside: FloatArray | None) -> InterferenceRegion:
        gains, heard = self.gains[np.ix_(users, users)], None if outside is None else outside[users]
        return InterferenceRegion(gains, self.bands[users], self.bandwidth, heard)

    def _heard(self, users: IntArray) -> FloatArray:
        """Return the power that each receiver hears in its band from these users and from `outside`, [n]."""
        same_band = self.bands[:, None] == self.bands[users]
        heard = np.where(same_band, self.gains[:, users], 0.0).sum(axis=1)
        return np.asarray(heard if self.outside is None else heard + self.outside)
