"""The rates of clients that send in two bands at once, each receiver taking the others of its band as noise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from narrowcast.algorithms.channel.regions import Independent, check_users
from narrowcast.platform.types import BoolArray, FloatArray, IntArray


@dataclass(frozen=True)
class InterferenceRegion:
    """B log2(1 + own / (1 + interference)) for each user, where all users send all the time.

    Shapes: gains [n, n], power over noise of user j at the receiver of user i, with the own signal on the diagonal;
    bands [n]; bandwidth of a band in hertz; `others` [n], the power of senders that are no users, None: 0. `take`
    leaves users out, who are silent then, so that the others' rates rise; unlike in a multiple-access channel, no rate
    can be traded for another.
    """

    ordered: ClassVar[bool] = True
    gains: FloatArray
    bands: IntArray
    bandwidth: float
    others: FloatArray | None = None

    def __post_init__(self) -> None:
        check_users(np.diag(self.gains), "SNR", "a power ratio, not decibel")

    def __len__(self) -> int:
        return len(self.bands)

    @cached_property
    def rates(self) -> FloatArray:
        """The rate of each user among all the others, [n], in bits per second."""
        own = np.diag(self.gains)
        heard = self._heard(np.arange(len(self))) - own
        return np.asarray(self.bandwidth * np.log1p(own / (1 + heard)) / np.log(2))

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
        return self._part(users, self.others)

    def contracted(self, users: IntArray) -> InterferenceRegion:
        """Return the region of the other users, whom these users disturb as before."""
        return self._part(np.delete(np.arange(len(self)), users), self._heard(users))

    def _part(self, users: IntArray, others: FloatArray | None) -> InterferenceRegion:
        gains, heard = self.gains[np.ix_(users, users)], None if others is None else others[users]
        return InterferenceRegion(gains, self.bands[users], self.bandwidth, heard)

    def _heard(self, users: IntArray) -> FloatArray:
        """Return the power that each receiver hears in its band from these users and from `others`, [n]."""
        same = self.bands[:, None] == self.bands[users]
        heard = np.where(same, self.gains[:, users], 0.0).sum(axis=1)
        return np.asarray(heard if self.others is None else heard + self.others)
