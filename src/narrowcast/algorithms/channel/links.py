"""What a channel gives a cohort in a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from narrowcast.algorithms.channel.regions import Region
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import BoolArray, FloatArray, IntArray, Profiles


@dataclass(frozen=True)
class Links:
    """The links of a round's cohort, all [C] in the order of its profiles.

    `uplink_bits_per_second` is a client's rate while the others are silent; which rates they can have together is the
    `region`, whose users are the places in the cohort. `lost` marks the uploads that an outage takes: they are paid
    for, and do not enter the sum.
    """

    uplink_bits_per_second: FloatArray
    downlink_bits_per_second: FloatArray
    lost: BoolArray
    region: Region

    def __post_init__(self) -> None:
        sizes = {len(self.uplink_bits_per_second), len(self.downlink_bits_per_second), len(self.lost), len(self.region)}
        assert len(sizes) == 1, f"links of different cohorts: {sizes}"

    def delivered(self, uplink_bits: IntArray) -> BoolArray:
        """Which of the uploads [C] enter the sum: those that were sent and not lost."""
        return (uplink_bits > 0) & ~self.lost


class Channel(Protocol):
    """A frozen model of the links between clients and server, from round to round."""

    @property
    def kind(self) -> str:
        """Its name in the catalog."""
        ...

    def draw(self, profiles: Profiles, seed: int, round_index: int) -> Links:
        """The links of this cohort in this round (counted from 1); raises `UserError` for an empty cohort.

        Pure, and each client's own figures depend on (seed, round, client) alone, never on who else is there.
        """
        ...


def check_cohort(profiles: Profiles) -> None:
    """Raise `UserError` for nobody, and for rates that are no rates."""
    if not len(profiles):
        raise UserError("the cohort is empty; a channel needs at least one client")
    for direction in ("uplink", "downlink"):
        rates = getattr(profiles, f"{direction}_bits_per_second")
        if (bad := np.flatnonzero(~(np.isfinite(rates) & (rates > 0)))).size:
            client, rate = profiles.client[bad[0]], rates[bad[0]]
            raise UserError(f"client {client}: {direction} of {rate} bits per second; it must be finite and above 0")


def nobody_lost(profiles: Profiles) -> BoolArray:
    """No outage, [C]."""
    return np.zeros(len(profiles), dtype=bool)
