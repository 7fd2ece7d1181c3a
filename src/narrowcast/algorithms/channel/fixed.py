"""Links that are what the fleet says, and links that wander around it."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from narrowcast.algorithms.channel.draws import block_of, normals
from narrowcast.algorithms.channel.links import Links, check_cohort, nobody_lost
from narrowcast.algorithms.channel.regions import Independent
from narrowcast.platform.types import Profiles


class Fixed(BaseModel):
    """Every client has the rates of its profile, in every round, whatever the others do."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["fixed"] = "fixed"

    def draw(self, profiles: Profiles, seed: int, round_index: int) -> Links:
        """The profiles' rates; raises `UserError` for an empty cohort."""
        del seed, round_index
        check_cohort(profiles)
        uplink = profiles.uplink_bits_per_second
        return Links(uplink, profiles.downlink_bits_per_second, nobody_lost(profiles), Independent(uplink))


class LogNormalRates(BaseModel):
    """The rates of a client's profile times exp(sigma Z), Z normal and drawn anew in every block of rounds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["lognormal"] = "lognormal"
    uplink_sigma: float = Field(0.5, ge=0, le=10, description="of the logarithm; the profile's rate is the median")
    downlink_sigma: float = Field(0.5, ge=0, le=10)
    coherence: int = Field(1, ge=1, description="rounds for which a rate stays as it is")

    def draw(self, profiles: Profiles, seed: int, round_index: int) -> Links:
        """Rates of this round's block; raises `UserError` for an empty cohort."""
        check_cohort(profiles)
        block = block_of(round_index, self.coherence)
        up, down = (normals(seed, f"channel {way}", block, profiles.client) for way in ("uplink", "downlink"))
        uplink = profiles.uplink_bits_per_second * np.exp(self.uplink_sigma * up)
        downlink = profiles.downlink_bits_per_second * np.exp(self.downlink_sigma * down)
        return Links(uplink, downlink, nobody_lost(profiles), Independent(uplink))
