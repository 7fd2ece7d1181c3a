"""Which clients can be sampled at a moment of the virtual clock."""

from __future__ import annotations

from typing import Annotated, Literal, Protocol, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from narrowcast.platform.kinds import Registry
from narrowcast.platform.seeds import stream_keys, uniform_unit
from narrowcast.platform.simulation.availability_trace import AvailabilityTrace
from narrowcast.platform.types import BoolArray


class Availability(Protocol):
    """A frozen model of who is there when."""

    @property
    def kind(self) -> str:
        """Its name in the catalog."""
        ...

    def check(self, n_clients: int) -> None:
        """Raise a `UserError` where it does not fit this many clients."""
        ...

    def free(self, n_clients: int, seed: int, round_index: int, seconds: float) -> BoolArray | None:
        """Who can be sampled in this round, which begins so many simulated seconds after the first, [U]; None for all.

        Pure, and each client's answer depends on (seed, round, time, client) alone, never on who else is there.
        """
        ...


class Always(BaseModel):
    """Everyone, at any time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["always"] = "always"

    def check(self, n_clients: int) -> None:
        """Fits any number."""

    def free(self, n_clients: int, seed: int, round_index: int, seconds: float) -> BoolArray | None:
        """Everyone."""
        del n_clients, seed, round_index, seconds
        return None


class Bernoulli(BaseModel):
    """Each client is there with the same probability, drawn anew for each round."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["bernoulli"] = "bernoulli"
    probability: float = Field(0.5, ge=0, le=1)

    def check(self, n_clients: int) -> None:
        """Fits any number."""

    def free(self, n_clients: int, seed: int, round_index: int, seconds: float) -> BoolArray:
        """Who is there in this round, whenever that is."""
        del seconds
        return _uniform(n_clients, seed, "availability", round_index) < self.probability


class Diurnal(BaseModel):
    """The probability swings as a cosine from `highest`, at a client's own midnight, to `lowest` half a day later.

    Reference: Bonawitz et al., Towards Federated Learning at Scale: System Design, MLSys 2019 (arXiv:1902.01046),
    section 9: devices are free at night, and four times as many of them as by day.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["diurnal"] = "diurnal"
    lowest: float = Field(0.1, ge=0, le=1, description="probability at noon")
    highest: float = Field(0.4, ge=0, le=1, description="probability at midnight, when the run begins")
    day_seconds: float = Field(86400.0, gt=0, allow_inf_nan=False)
    time_zones: float = Field(0.0, ge=0, le=1, description="share of the day over which clients' midnights spread")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.lowest > self.highest:
            raise ValueError(f"lowest = {self.lowest} is above highest = {self.highest}")
        return self

    def check(self, n_clients: int) -> None:
        """Fits any number."""

    def free(self, n_clients: int, seed: int, round_index: int, seconds: float) -> BoolArray:
        """Who is there, drawn for this round with the probability of its first second."""
        zone = self.time_zones * _uniform(n_clients, seed, "time zone", 0)
        night = (1 + np.cos(2 * np.pi * (seconds / self.day_seconds - zone))) / 2
        probability = self.lowest + (self.highest - self.lowest) * night
        return _uniform(n_clients, seed, "availability", round_index) < probability


def _uniform(n_clients: int, seed: int, purpose: str, round_index: int) -> np.ndarray:
    keys = stream_keys(seed, purpose, round_index, np.arange(n_clients))
    return uniform_unit(keys, np.zeros(n_clients, dtype=np.int64))


AVAILABILITIES = Registry(
    "availability",
    Availability,
    {"always": Always, "bernoulli": Bernoulli, "diurnal": Diurnal, "trace": AvailabilityTrace},
)
AnyAvailability = Annotated[Availability, AVAILABILITIES]
