"""The links of a cohort in a round, and the channels that draw them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from narrowcast.algorithms.channel.regions import Region, undecodable
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import BoolArray, FloatArray, Profiles


@dataclass(frozen=True)
class Links:
    """The links of a round's cohort, all [C] in the order of its profiles.

    `uplink_bits_per_second` is a client's rate while the others are silent; `region` has the rates that are feasible
    together, its users are places in the cohort. `lost` marks uploads lost to outage: their bits count, and they do not
    enter the sum. Where gains are estimated, rates and `region` follow from the estimates, and `actual` is the region
    of the gains themselves, which only the loss of uploads depends on; None: `region` is exact.
    """

    uplink_bits_per_second: FloatArray
    downlink_bits_per_second: FloatArray
    lost: BoolArray
    region: Region
    actual: Region | None = None

    def __post_init__(self) -> None:
        sizes = {len(self.uplink_bits_per_second), len(self.downlink_bits_per_second), len(self.lost), len(self.region)}
        sizes |= {len(self.region if self.actual is None else self.actual)}
        assert len(sizes) == 1, f"links of different cohorts: {sizes}"

    def lost_at(self, bits_per_second: FloatArray) -> BoolArray:
        """Return the uploads [C] that are lost at these planned rates [C], as a mask; 0 stands for a silent client."""
        return self.lost if self.actual is None else self.lost | undecodable(self.actual, bits_per_second)


class Channel(Protocol):
    """The links between clients and server, round by round; a frozen model."""

    @property
    def kind(self) -> str:
        """The name in the catalog."""
        ...

    def draw(self, profiles: Profiles, seed: int, round_index: int) -> Links:
        """Return the links of this cohort in this round (counted from 1); raise `UserError` for an empty cohort.

        Pure: each client's rates depend on (seed, round, client) alone, never on the rest of the cohort.
        """
        ...


def check_cohort(profiles: Profiles) -> None:
    """Raise `UserError` for an empty cohort, and for rates that are not finite and above 0."""
    if not len(profiles):
        raise UserError("the cohort is empty; a channel needs at least one client")
    for direction in ("uplink", "downlink"):
        rates = getattr(profiles, f"{direction}_bits_per_second")
        if (bad := np.flatnonzero(~(np.isfinite(rates) & (rates > 0)))).size:
            client, rate = profiles.client[bad[0]], rates[bad[0]]
            raise UserError(f"client {client}: {direction} of {rate} bits per second; it must be finite and above 0")


def nobody_lost(profiles: Profiles) -> BoolArray:
    """Return a mask without outages, [C]."""
    return np.zeros(len(profiles), dtype=bool)
