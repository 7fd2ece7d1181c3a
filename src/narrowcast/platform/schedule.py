"""When the server steps: after a round of everyone, or whenever enough updates have come in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from narrowcast.platform.kinds import Registry

if TYPE_CHECKING:  # the loop imports plans, and these their schedules
    from narrowcast.platform.asynchronous import OpenStep
    from narrowcast.platform.open_round import OpenRound
    from narrowcast.platform.outcome import Outcome
    from narrowcast.platform.state import LiveState
    from narrowcast.platform.types import ChunkResult


class Synchronous(BaseModel):
    """Rounds: all clients of a cohort start together, and the server steps when those it waits for are done."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["synchronous"] = "synchronous"

    def open(self, live: LiveState) -> OpenRound:
        """Begin a round: sample the cohort and broadcast."""
        from narrowcast.platform.round_opening import open_round

        return open_round(live)

    def close(self, live: LiveState, opened: OpenRound, results: list[ChunkResult]) -> Outcome:
        """End the round: fold the results and step the server."""
        from narrowcast.platform.round_closing import close_round

        return close_round(live, opened, results)


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

    def open(self, live: LiveState) -> OpenStep:
        """Send clients out until the next step has all of its updates."""
        from narrowcast.platform.asynchronous import open_step

        return open_step(live)

    def close(self, live: LiveState, opened: OpenStep, results: list[ChunkResult]) -> Outcome:
        """Step the server with these updates."""
        from narrowcast.platform.asynchronous import close_step

        return close_step(live, opened, results)


class Schedule(Protocol):
    """A frozen model of when the server steps, and with whose updates.

    What `open` returns has the `run` and the `calls` of local training, which are made before `close`.
    """

    @property
    def kind(self) -> str:
        """Its name in the catalog."""
        ...

    def open(self, live: LiveState) -> Any:
        """Begin a round of a run: decide who trains, and what is sent to them."""
        ...

    def close(self, live: LiveState, opened: Any, results: list[ChunkResult]) -> Outcome:
        """End the round with the results of its calls, in their order; advance `live` and return the outcome."""
        ...


SCHEDULES = Registry("schedule", Schedule, {"synchronous": Synchronous, "buffered": Buffered})
AnySchedule = Annotated[Schedule, SCHEDULES]
