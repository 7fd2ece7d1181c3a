"""A fleet: phones in a city, some of them on the underground."""

from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from narrowcast.extend import IntArray, Profiles, generator


class CityFleet(BaseModel):
    """Links of `mbit_per_second` up and four times as much down; a tenth of that for the share on the underground."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["city"] = "city"
    mbit_per_second: float = Field(5.0, gt=0)
    underground: float = Field(0.2, ge=0, le=1, description="share of the clients")

    def profiles(self, examples: IntArray, seed: int) -> Profiles:
        """Return the profile of each client; speeds are log-normal around 1."""
        random = generator(seed, "city fleet")
        below = random.random(len(examples)) < self.underground
        uplink = 1e6 * self.mbit_per_second * np.where(below, 0.1, 1.0)
        speed = np.exp(0.3 * random.standard_normal(len(examples)))
        return Profiles(np.arange(len(examples)), examples, uplink, 4 * uplink, speed)
