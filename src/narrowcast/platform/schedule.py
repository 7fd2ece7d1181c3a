"""Schedules: the server steps after each synchronous round, or whenever enough updates have arrived."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from narrowcast.platform.kinds import Registry
from narrowcast.platform.section import Section


class Synchronous(Section):
    """Rounds: all clients of a cohort start together, and the server steps when those it waits for are done."""

    kind: Literal["synchronous"] = "synchronous"


class Buffered(Section):
    """FedBuff: `concurrency` clients train at any time, and the server steps after every `buffer_size` updates.

    Reference: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022
    (arXiv:2106.06639), Algorithm 1, with the staleness weight 1 / sqrt(1 + s) of its experiments.

    Differs from the paper: 1. the sum is divided by the algorithm's weights of the buffered clients (`weights: equal`
    gives the paper's 1 / K). 2. updates that arrive at one instant are processed before any client is sent out, so that
    with equal clients and K = M it is FedAvg. 3. a client is not sent out again before its update was used. 4. if no
    client is training and none can be sent out, the server steps with fewer than K updates.
    """

    kind: Literal["buffered"] = "buffered"
    concurrency: int = Field(60, ge=1, description="M, clients that train at any time; clients_per_round is not used")
    buffer_size: int = Field(10, ge=1, description="K, updates per server step")
    staleness_exponent: float = Field(
        0.5, ge=0, allow_inf_nan=False, description="an update s steps old has the weight (1 + s) ** -this"
    )


class Schedule(Protocol):
    """Contract of another schedule, a frozen model: the server's steps and the clients whose updates each uses.

    `rounds.py` opens and closes the rounds of the two above. `live` is the `LiveState` of the run; the result of `open`
    has the `run` and the `calls` of local training, which are made before `close`, which returns an `Outcome`.
    """

    @property
    def kind(self) -> str:
        """The schedule's name in the catalog."""
        ...

    def open(self, live: Any) -> Any:
        """Begin a round: choose the clients that train, and broadcast to them."""
        ...

    def close(self, live: Any, opened: Any, results: list[Any]) -> Any:
        """End the round with the results of its calls, in their order; advance `live` and return the outcome."""
        ...


SCHEDULES = Registry("schedule", Schedule, {"synchronous": Synchronous, "buffered": Buffered})
AnySchedule = Annotated[Synchronous | Buffered | Schedule, SCHEDULES]
