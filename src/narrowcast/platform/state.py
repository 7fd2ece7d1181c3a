"""The state of a run: as a checkpoint keeps it, and as it changes from round to round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np

from narrowcast.platform.contract_checks import check_final
from narrowcast.platform.errors import UserError
from narrowcast.platform.host_time import host_time
from narrowcast.platform.in_flight import AsyncState
from narrowcast.platform.interruption import interruptible
from narrowcast.platform.population import Population
from narrowcast.platform.run import Run
from narrowcast.platform.sampling import rotation_of
from narrowcast.platform.step import KeptState, arrays_under
from narrowcast.platform.types import Arrays, IntArray, all_finite

_TENSORS = ("participants", "last_round", "update_bits")
_NUMBERS = ("round_index", "uplink_bits", "downlink_bits", "resumed_after")


@dataclass(frozen=True)
class RunState:
    """Everything that the next round depends on; clients that never took part are in their initial state.

    Shapes: participants [P] ascending; last_round [P], the last round in which each took part; clients [P, ...], the
    private state of each; update_bits [rounds so far], the size of each round's update broadcast, 0 if there was none.
    `schedule` is the state of an asynchronous schedule. Rounds up to `settled_round` are in the journal already, so
    that repeating them must give the same results. `resumed_after` is the last round before the run was last resumed,
    0 if it never was: keys that live in a process only are no older.
    """

    round_index: int
    server: Arrays
    participants: IntArray
    last_round: IntArray
    clients: Arrays
    update_bits: IntArray
    uplink_bits: int
    downlink_bits: int
    simulated_seconds: float
    schedule: AsyncState | None = None
    settled_round: int = 0
    resumed_after: int = 0

    step_name: ClassVar[str] = "round"

    @property
    def step(self) -> int:
        """The last round that is finished."""
        return self.round_index

    def packed(self) -> tuple[Arrays, dict[str, str]]:
        """Return the tensors and the metadata of a checkpoint."""
        tensors = {name: getattr(self, name) for name in _TENSORS}
        schedule = {} if self.schedule is None else self.schedule.to_arrays()
        for prefix, arrays in (("server", self.server), ("clients", self.clients), ("schedule", schedule)):
            tensors |= {f"{prefix}/{name}": np.asarray(array, order="C") for name, array in arrays.items()}
        numbers = {name: str(getattr(self, name)) for name in _NUMBERS}
        return tensors, {**numbers, "simulated_seconds": self.simulated_seconds.hex()}

    @classmethod
    def unpacked(cls, tensors: Arrays, metadata: Mapping[str, str]) -> Self:
        """Return the state of a checkpoint; raise `KeyError` or `ValueError` if it is none."""
        return cls(
            round_index=int(metadata["round_index"]),
            uplink_bits=int(metadata["uplink_bits"]),
            downlink_bits=int(metadata["downlink_bits"]),
            resumed_after=int(metadata.get("resumed_after", 0)),
            simulated_seconds=float.fromhex(metadata["simulated_seconds"]),
            participants=tensors["participants"],
            last_round=tensors["last_round"],
            update_bits=tensors["update_bits"],
            server=arrays_under("server/", tensors),
            clients=arrays_under("clients/", tensors),
            schedule=AsyncState.from_arrays(arrays_under("schedule/", tensors)),
        )


def start(run: Run) -> RunState:
    """Return the state before round 1; raise `UserError` if the first weights are not finite, or not the model's."""
    nobody, server = np.empty(0, dtype=np.int64), run.algorithm.init(run.task)
    if not all_finite(*check_final(run.algorithm, run.task.initial_parameters(), server).values()):
        raise UserError("the first weights of the model are not finite; initialise them with finite values")
    return RunState(
        round_index=0,
        server=server,
        participants=nobody,
        last_round=nobody,
        clients={name: values[:0] for name, values in run.algorithm.init_clients(run.task).items()},
        update_bits=nobody,
        uplink_bits=0,
        downlink_bits=0,
        simulated_seconds=0.0,
    )


class Interrupted(KeyboardInterrupt):
    """The runs were stopped within a round; `states` holds the state of each after its last finished round."""

    def __init__(self, states: Sequence[KeptState]) -> None:
        super().__init__()
        self.states = states


@dataclass
class LiveState:
    """A run between two rounds, changed in place, unlike `RunState`, so that a round costs no more than its cohort.

    `rotation` [U] is the order in which round-robin sampling visits the clients. `kept_at` is the time of the last
    snapshot, on the monotonic clock. `resumed_after` holds the rounds after which the run was resumed: the last time
    but one, as the state has it, and the last time; 0 stands for a run that was never resumed.
    """

    run: Run
    rotation: IntArray
    round_index: int
    server: Arrays
    population: Population
    update_bits: list[int]
    uplink_bits: int
    downlink_bits: int
    simulated_seconds: float
    schedule: AsyncState | None
    resumed_after: tuple[int, int] = (0, 0)
    kept_at: float = field(default_factory=lambda: host_time().monotonic())

    @classmethod
    def of(cls, run: Run, state: RunState) -> LiveState:
        """Return the live state that continues from a kept one."""
        n_clients = run.task.data.n_clients
        population = Population.fresh(run.algorithm.init_clients(run.task), n_clients)
        population.put(state.participants, state.clients)
        population.last_round[state.participants] = state.last_round
        return cls(
            run=run,
            rotation=rotation_of(run.plan.sampling, run.plan.seed, n_clients),
            round_index=state.round_index,
            server=state.server,
            population=population,
            update_bits=state.update_bits.tolist(),
            uplink_bits=state.uplink_bits,
            downlink_bits=state.downlink_bits,
            simulated_seconds=state.simulated_seconds,
            schedule=state.schedule,
            resumed_after=(state.resumed_after, max(state.round_index, state.settled_round)),
        )

    @property
    def rounds_left(self) -> bool:
        """Return whether the plan has rounds that this run has not done."""
        return self.round_index < self.run.plan.rounds

    def keys_since(self) -> int:
        """Return the round after which the keys of the coming round were made; a repeated round has its old keys."""
        before, now = self.resumed_after
        return now if self.round_index >= now else before

    def snapshot(self) -> RunState:
        """Return the state to keep in order to continue from here."""
        self.kept_at = host_time().monotonic()
        participants = self.population.participants()
        return RunState(
            round_index=self.round_index,
            server=self.server,
            participants=participants,
            last_round=self.population.last_round[participants],
            clients=self.population.take(participants),
            update_bits=np.array(self.update_bits, dtype=np.int64),
            uplink_bits=self.uplink_bits,
            downlink_bits=self.downlink_bits,
            simulated_seconds=self.simulated_seconds,
            schedule=self.schedule,
            resumed_after=self.keys_since(),
        )


@contextmanager
def stoppable(*runs: LiveState) -> Iterator[None]:
    """Allow signals to stop the runs within this block, which must not change them; raise `Interrupted` if one does."""
    try:
        with interruptible():
            yield
    except KeyboardInterrupt:
        raise Interrupted([each.snapshot() for each in runs]) from None
