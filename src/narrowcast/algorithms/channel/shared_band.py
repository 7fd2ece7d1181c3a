"""Channels with one band for all clients: the Gaussian multiple-access channel, and K(S) tables."""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from narrowcast.algorithms.channel.gain_estimates import GainEstimates
from narrowcast.algorithms.channel.links import Links, check_cohort, nobody_lost
from narrowcast.algorithms.channel.regions import GaussianRegion
from narrowcast.algorithms.channel.table_region import TableRegion
from narrowcast.platform.errors import UserError
from narrowcast.platform.section import Section
from narrowcast.platform.types import Profiles

_HIGHEST_BITS_PER_HERTZ = 300.0


class MultipleAccess(GainEstimates):
    """All clients upload in the same band, each with the SNR at which its single-user rate is its profile's uplink.

    The region is R(S) = B log2(1 + the sum of the SNRs over S). SNRs are constant; their estimates differ by the round.
    """

    kind: Literal["multiple_access"] = "multiple_access"
    bandwidth_hertz: float = Field(1e6, gt=0, allow_inf_nan=False, description="bandwidth of the shared band")

    def draw(self, profiles: Profiles, seed: int, round_index: int) -> Links:
        """Return the links of this round; raise `UserError` for an empty cohort, or a rate beyond the band."""
        check_cohort(profiles)
        uplink = profiles.uplink_bits_per_second
        fastest = int(uplink.argmax())
        if uplink[fastest] > _HIGHEST_BITS_PER_HERTZ * self.bandwidth_hertz:
            raise UserError(
                f"client {profiles.client[fastest]}: {uplink[fastest]:g} bits per second in a band of "
                f"{self.bandwidth_hertz:g} Hz; give the channel at least a {_HIGHEST_BITS_PER_HERTZ:g}th of it in hertz"
            )
        snr = np.expm1(uplink / self.bandwidth_hertz * np.log(2))
        region = GaussianRegion(snr, self.bandwidth_hertz)
        downlink, lost = profiles.downlink_bits_per_second, nobody_lost(profiles)
        if self.knows_gains:
            return Links(uplink, downlink, lost, region)
        planned = GaussianRegion(self.planned(snr, seed, round_index, profiles.client), self.bandwidth_hertz)
        return Links(planned.single_rates(), downlink, lost, planned, region)


class Capacity(Section):
    """The total uplink rate of a set of clients."""

    clients: tuple[int, ...] = Field(min_length=1, description="the clients of the set")
    bits_per_second: float = Field(ge=0, allow_inf_nan=False, description="largest sum of their uplink rates")


class RateTable(Section):
    """The rate region of a few clients, set by set, eq. (7) of the wireless report; downlinks are those of profiles.

    A cohort gets its part of the table. A table that is not a polymatroid is refused with the sets that show it.
    """

    kind: Literal["table"] = "table"
    capacities: tuple[Capacity, ...] = Field(
        min_length=1, description="capacity of each non-empty set of the clients 0, 1, ..."
    )

    @model_validator(mode="after")
    def _is_a_polymatroid(self) -> Self:
        sets = [frozenset(each.clients) for each in self.capacities]
        if twice := {tuple(sorted(each)) for each in sets if sets.count(each) > 1}:
            raise ValueError(f"capacities: the set {sorted(twice)[0]} is given twice; keep one")
        self.region()
        return self

    def region(self) -> TableRegion:
        """Return the region of all the table's clients."""
        return TableRegion.of({each.clients: each.bits_per_second for each in self.capacities})

    def draw(self, profiles: Profiles, seed: int, round_index: int) -> Links:
        """Return the same links in every round; raise `UserError` for an empty cohort, or a client not in the table."""
        del seed, round_index
        check_cohort(profiles)
        region = self.region()
        if (unknown := profiles.client[profiles.client >= len(region)]).size:
            raise UserError(
                f"client {unknown[0]} is not in the K(S) table, which has the clients 0 to {len(region) - 1}"
            )
        cohort = region.take(profiles.client)
        return Links(cohort.single_rates(), profiles.downlink_bits_per_second, nobody_lost(profiles), cohort)
