"""When the server steps: after a round of everyone, or whenever enough updates have come in."""

from __future__ import annotations

from typing import Annotated, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from narrowcast.platform.kinds import Registry


class Synchronous(BaseModel):
    """Rounds: all clients of a cohort start together, and the server steps when those it waits for are done."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["synchronous"] = "synchronous"


class Buffered(BaseModel):
    """FedBuff: `concurrency` clients are always at work, and the server steps whenever `buffer_size` have come in.

    Reference: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022
    (arXiv:2106.06639), Algorithm 1, with the staleness weight 1 / sqrt(1 + s) of its experiments.

    Differs from the paper: 1. the sum is divided by the weights of the buffer's clients as the algorithm has them
    (`weights: equal` gives the paper's 1 / K). 2. what arrives in one instant arrives before anyone new is sent out, so
    that with equal clients and K = M it is FedAvg. 3. a client is not sent out again before its update was used.
    4. where nobody is at work and nobody can be sent out, the server steps with fewer than K.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["buffered"] = "buffered"
    concurrency: int = Field(60, ge=1, description="M, clients at work at any time; clients_per_round is not used")
    buffer_size: int = Field(10, ge=1, description="K, updates to a step")
    staleness_exponent: float = Field(
        0.5, ge=0, allow_inf_nan=False, description="an update of s steps ago counts (1 + s) to the minus this"
    )


class Schedule(Protocol):
    """A frozen model of when the server steps."""

    @property
    def kind(self) -> str:
        """Its name in the catalog."""
        ...


SCHEDULES = Registry("schedule", Schedule, {"synchronous": Synchronous, "buffered": Buffered})
AnySchedule = Annotated[Synchronous | Buffered, SCHEDULES]
