"""Channels from the fleet's rates alone: constant, or lognormal around them."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.channel.channel_random import block_of, normals
from narrowcast.algorithms.channel.links import Links, check_cohort, nobody_lost
from narrowcast.algorithms.channel.regions import Independent
from narrowcast.platform.section import Section
from narrowcast.platform.types import Profiles
from narrowcast.platform.units import ROUNDS


class Fixed(Section):
    """Constant links: every client has the rates of its profile, independently of the others."""

    kind: Literal["fixed"] = "fixed"

    def draw(self, profiles: Profiles, seed: int, round_index: int) -> Links:
        """Return the profiles' rates; raise `UserError` for an empty cohort."""
        del seed, round_index
        check_cohort(profiles)
        uplink = profiles.uplink_bits_per_second
        return Links(uplink, profiles.downlink_bits_per_second, nobody_lost(profiles), Independent(uplink))


class LogNormalRates(Section):
    """The rates of a client's profile times exp(sigma Z), with a standard normal Z per client and block of rounds."""

    kind: Literal["lognormal"] = "lognormal"
    uplink_sigma: float = Field(
        0.5,
        ge=0,
        le=10,
        description="standard deviation of the natural log of the uplink rate; the profile's is the median",
    )
    downlink_sigma: float = Field(0.5, ge=0, le=10, description="the same of the downlink rate")
    coherence: int = Field(1, ge=1, description="length of a block of constant rates", json_schema_extra=ROUNDS)

    def draw(self, profiles: Profiles, seed: int, round_index: int) -> Links:
        """Return the rates of this round's block; raise `UserError` for an empty cohort."""
        check_cohort(profiles)
        block = block_of(round_index, self.coherence)
        up, down = (normals(seed, f"channel {way}", block, profiles.client) for way in ("uplink", "downlink"))
        uplink = profiles.uplink_bits_per_second * np.exp(self.uplink_sigma * up)
        downlink = profiles.downlink_bits_per_second * np.exp(self.downlink_sigma * down)
        return Links(uplink, downlink, nobody_lost(profiles), Independent(uplink))
