"""Models of client availability: the clients that can be sampled at a time of the virtual clock."""

from __future__ import annotations

from typing import Annotated, Literal, Protocol, Self

import numpy as np
from pydantic import Field, model_validator

from narrowcast.platform.kinds import Registry
from narrowcast.platform.section import Section
from narrowcast.platform.seeds import stream_keys, uniform_unit
from narrowcast.platform.simulation.availability_trace import AvailabilityTrace
from narrowcast.platform.types import BoolArray


class Availability(Protocol):
    """Contract of an availability model."""

    @property
    def kind(self) -> str:
        """Name in the catalog."""
        ...

    def check(self, n_clients: int) -> None:
        """Raise `UserError` if the model does not fit this number of clients."""
        ...

    def free(self, n_clients: int, seed: int, round_index: int, seconds: float) -> BoolArray | None:
        """Return whether each client can be sampled in this round [U], or None if all can.

        `seconds` is the simulated time at which the round begins. Pure: the answer for a client depends on seed, round,
        time and client only, never on other clients.
        """
        ...


class Always(Section):
    """All clients are always available."""

    kind: Literal["always"] = "always"

    def check(self, n_clients: int) -> None:
        """Accept any number of clients."""

    def free(self, n_clients: int, seed: int, round_index: int, seconds: float) -> BoolArray | None:
        """Return None: every client is available."""
        del n_clients, seed, round_index, seconds
        return None


class Bernoulli(Section):
    """Each client is available with the same probability, drawn independently in each round."""

    kind: Literal["bernoulli"] = "bernoulli"
    probability: float = Field(0.5, ge=0, le=1, description="probability that a client is available")

    def check(self, n_clients: int) -> None:
        """Accept any number of clients."""

    def free(self, n_clients: int, seed: int, round_index: int, seconds: float) -> BoolArray:
        """Return the clients available in this round, independent of the time."""
        del seconds
        return _uniform(n_clients, seed, "availability", round_index) < self.probability


class Diurnal(Section):
    """Each client is available with a probability that follows a cosine over the day.

    The probability is `highest` at the client's own midnight and `lowest` half a day later.

    Reference: Bonawitz et al., Towards Federated Learning at Scale: System Design, MLSys 2019 (arXiv:1902.01046),
    section 9: four times as many devices are available at night as by day.
    """

    kind: Literal["diurnal"] = "diurnal"
    lowest: float = Field(0.1, ge=0, le=1, description="probability at noon")
    highest: float = Field(0.4, ge=0, le=1, description="probability at midnight, the time at which a run starts")
    day_seconds: float = Field(86400.0, gt=0, allow_inf_nan=False, description="length of a day of the virtual clock")
    time_zones: float = Field(0.0, ge=0, le=1, description="share of the day over which clients' midnights spread")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.lowest > self.highest:
            raise ValueError(f"lowest = {self.lowest} is above highest = {self.highest}")
        return self

    def check(self, n_clients: int) -> None:
        """Accept any number of clients."""

    def free(self, n_clients: int, seed: int, round_index: int, seconds: float) -> BoolArray:
        """Return the available clients, drawn with the probability at the start of the round."""
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
