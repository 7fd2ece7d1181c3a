"""The plan of a run: its number of rounds, schedule, client sampling, deadlines, accounting and checkpoints.

A schedule says when the server steps: after each synchronous round, or whenever enough updates have arrived.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_serializer,
    field_validator,
)

from narrowcast.platform.config.catalog import SCHEDULES
from narrowcast.platform.config.fields import ROUNDS, Name, Role
from narrowcast.platform.config.files import Section
from narrowcast.platform.config.run_fields import CheckpointEvery, CheckpointPath, CheckpointSeconds, CheckpointsKept
from narrowcast.platform.contracts import Radio
from narrowcast.platform.rounds.client_contracts import ClientSplit
from narrowcast.platform.rounds.fleet import Clock
from narrowcast.platform.rounds.sampling import Always, AnyAvailability, AnySampling, RoundRobin
from narrowcast.platform.seeds import PrivateSeed


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

    `loop.py` opens and closes the rounds of the two above. `live` is the `LiveState` of the run; the result of `open`
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


AnySchedule = Annotated[Synchronous | Buffered | Schedule, SCHEDULES]


def _several(value: Any) -> Any:
    """`test` is `[test]`; a split counts once."""
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    return tuple(dict.fromkeys(value)) if isinstance(value, list | tuple) else value


EvaluatedSplits = Annotated[
    tuple[ClientSplit, ...],
    BeforeValidator(_several, json_schema_input_type=ClientSplit | tuple[ClientSplit, ...] | None),
]


class Plan(Section):
    """Fields of an experiment that concern its rounds.

    `downlink: catch_up` charges each client the updates of the rounds it missed, or the whole model if that is less.
    `from_start` does so for clients that hold the model before round 1, as those of `start_from`: a newcomer is charged
    the updates of all rounds, and nobody is sent anything in round 1. `every_round` assumes that all clients listen to
    every broadcast and charges the cohort one round's update, as the CoLR paper does.

    The server waits for the first `clients_per_round` uploads of the sampled clients, and no longer than
    `deadline_seconds`. A late client has received, computed and sent; all of it is counted, and its upload is not
    aggregated. With `stragglers: partial` a client does as many epochs as let its upload meet the deadline, as in
    FedProx (Li et al., MLSys 2020); a client that cannot finish one epoch is late.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    seed: Annotated[int, Role(not_tuned="the seeds of a trial are study.seeds")] = Field(
        0, ge=0, lt=2**63, description="seed of the run, and of its data unless data.seed is set"
    )
    client_seed: Annotated[int | None, Role(not_tuned="it follows the seeds of a trial, study.seeds")] = Field(
        None, ge=0, lt=2**63, description="seed of clients' private draws, such as negatives; null: derived from seed"
    )
    rounds: Annotated[int, Role(identity=False)] = Field(100, ge=1, description="number of rounds")
    clients_per_round: int = Field(
        60, ge=1, description="number of clients sampled per round; all of them if there are fewer"
    )
    sampling: AnySampling = Field(
        RoundRobin(),
        description="client sampling: a shuffled rotation, or an independent draw in each round: of equal "
        "probabilities, by the clients' numbers of examples, of each client by itself, or of as many as have time",
    )
    replacement: bool = Field(
        False,
        description="draw uniform and by_examples with replacement: a client drawn k times trains once and has k times "
        "its weight",
    )
    new_clients: Annotated[int, Field(ge=0)] | Annotated[float, Field(gt=0, lt=1)] = Field(
        0,
        description="number or share of the clients that never take part, drawn by the seed; evaluate_clients measures "
        "them as clients that join after the last round",
    )
    availability: AnyAvailability = Field(Always(), description="when clients can be sampled")
    over_selection: float = Field(
        1.0,
        ge=1,
        le=1e6,
        allow_inf_nan=False,
        description="ratio of the clients sampled to the clients waited for, clients_per_round",
    )
    deadline_seconds: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="longest round on the virtual clock; null: no limit"
    )
    stragglers: Literal["drop", "partial"] = Field(
        "drop", description="late clients: drop their uploads, or let them do the epochs that meet the deadline"
    )
    chunk_size: int = Field(
        30, ge=1, description="largest number of clients trained as one tensor program; results depend on it"
    )
    downlink: Literal["catch_up", "from_start", "every_round"] = Field(
        "catch_up",
        description="downlink accounting: the updates a client missed, where newcomers hold nothing, or hold the model "
        "before round 1; or one update for each of the cohort",
    )
    clock: Clock = Field(Clock(), description="constants of the virtual clock")
    radio: Radio | None = Field(
        None, description="channel, budgets and allocation of a round's bits; null: the links of the fleet"
    )
    schedule: AnySchedule = Field(Synchronous(), description="synchronous rounds, or buffered asynchronous steps")
    evaluate_every: Annotated[int, Role(identity=False, not_tuned="trials are compared after the same rounds")] = Field(
        10, ge=1, description="interval of evaluations; the last round has one", json_schema_extra=ROUNDS
    )
    evaluate_clients: Annotated[
        EvaluatedSplits, Role(identity=False, not_tuned="trials are compared by the same metrics")
    ] = Field(
        (),
        description="splits of which an evaluation also measures each client on its own samples: test, validation, "
        "train; [] for none",
    )
    checkpoint_every: CheckpointEvery = Field(None, json_schema_extra=ROUNDS)
    checkpoint_seconds: CheckpointSeconds = 10.0
    checkpoints_kept: CheckpointsKept = 2
    checkpoint_path: CheckpointPath = None
    name: Annotated[Name, Role(identity=False, shared=True, not_tuned="trials are named after their study")] = Field(
        "run", max_length=100, description="name of the run and of its folder"
    )

    @field_validator("replacement")
    @classmethod
    def _draws_can_repeat(cls, value: bool, info: ValidationInfo) -> bool:
        if value and (sampling := info.data.get("sampling")) is not None and not sampling.repeats:
            raise ValueError(f"sampling = {sampling.kind} repeats no client; use uniform or by_examples")
        return value

    @field_validator("over_selection")
    @classmethod
    def _waits_for_every_draw(cls, value: float, info: ValidationInfo) -> float:
        if value != 1 and info.data.get("replacement"):
            raise ValueError("the first uploads of draws with replacement are undefined; leave out one of both")
        return value

    @field_validator("stragglers")
    @classmethod
    def _partial_work_has_a_deadline(cls, value: str, info: ValidationInfo) -> str:
        if value == "partial" and info.data.get("deadline_seconds") is None:
            raise ValueError("needs a deadline; give deadline_seconds too")
        return value

    @field_validator("schedule")
    @classmethod
    def _without_rounds_nobody_is_late(cls, value: AnySchedule, info: ValidationInfo) -> AnySchedule:
        asked, deadline, radio = (info.data.get(name) for name in ("over_selection", "deadline_seconds", "radio"))
        plain = asked == 1 and deadline is None and radio is None and not info.data.get("replacement")
        if value.kind == "buffered" and not plain:
            raise ValueError(
                "has no rounds; leave out radio, over_selection, deadline_seconds and replacement, or schedule"
            )
        if value.kind == "buffered" and (sampling := info.data.get("sampling")) is not None and not sampling.bounded:
            raise ValueError(
                f"sends out as many clients as are free to train; sampling = {sampling.kind} has no number"
            )
        return value

    @field_serializer("sampling", mode="wrap")
    def _by_name(self, value: Any, handler: SerializerFunctionWrapHandler) -> Any:
        """A sampling without fields is written as its name, as it was before it could have any."""
        written = handler(value)
        return written["kind"] if isinstance(written, dict) and written.keys() == {"kind"} else written

    @property
    def private_seed(self) -> PrivateSeed:
        """The seed of the private stream: `client_seed`, or derived from `seed`."""
        if self.client_seed is None:
            return PrivateSeed.derived(self.seed)
        return PrivateSeed(self.client_seed, own=self.client_seed != self.seed)

    def keeps(self, round_index: int, seconds: float) -> bool:
        """Return whether a checkpoint is due after this round, the given wall time after the last one."""
        by_round = self.checkpoint_every is not None and round_index % self.checkpoint_every == 0
        return by_round or seconds >= self.checkpoint_seconds or round_index == self.rounds

    def evaluates(self, round_index: int) -> bool:
        """Return whether the metrics are evaluated after this round."""
        return round_index % self.evaluate_every == 0 or round_index == self.rounds

    @property
    def waits_for_all(self) -> bool:
        """Return whether no client can be late."""
        return self.over_selection == 1 and self.deadline_seconds is None
