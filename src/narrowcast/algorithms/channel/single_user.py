"""The single-user channel of the wireless report: a budget of levels for each coordinate."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.channel.links import Links, check_cohort, nobody_lost
from narrowcast.algorithms.channel.regions import Independent
from narrowcast.platform.section import Section
from narrowcast.platform.types import Profiles
from narrowcast.platform.units import SECONDS


class SingleUser(Section):
    """Each client alone with a budget of K levels a coordinate, d log2 K bits a round (eq. (6) of the wireless report).

    Values quantised to k <= K levels arrive unchanged. Above the budget they arrive with N(0, 1 / (4 K^2)) added,
    clipped to [0, 1] and quantised again to k levels. The report calls this unbiased; its folder of `papers/`
    has both, and the bias in closed form.

    Differs from the paper: 1. drawn as `Links`, k levels count log2 k bits, as in the wireless report, although
    0..k are k + 1 symbols, and norm and signs count nothing.
    """

    kind: Literal["single_user"] = "single_user"
    dimension: int = Field(ge=1, description="d, the number of a model's coordinates")
    uplink_levels: float = Field(
        2.0**8, gt=1, allow_inf_nan=False, description="K_U, uplink levels for each coordinate"
    )
    downlink_levels: float = Field(
        2.0**8, gt=1, allow_inf_nan=False, description="K_D, downlink levels for each coordinate"
    )
    seconds: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="time in which a client can send its budget",
        json_schema_extra=SECONDS,
    )

    def draw(self, profiles: Profiles, seed: int, round_index: int) -> Links:
        """Return the same budget for every client and round; raise `UserError` for an empty cohort."""
        del seed, round_index
        check_cohort(profiles)
        uplink, downlink = (
            np.full(len(profiles), self.dimension * np.log2(levels) / self.seconds)
            for levels in (self.uplink_levels, self.downlink_levels)
        )
        return Links(uplink, downlink, nobody_lost(profiles), Independent(uplink))
