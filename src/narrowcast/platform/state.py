"""Where a run stands: as it is kept, and as it changes from round to round."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from narrowcast.platform.contracts import Algorithm, Task
from narrowcast.platform.interruption import interruptible
from narrowcast.platform.population import Population
from narrowcast.platform.types import Arrays, IntArray


@dataclass(frozen=True)
class RunState:
    """Everything that the next round depends on, as it is kept; clients that never took part are as they started.

    Shapes: participants [P] ascending; last_round [P], the last round in which each took part; clients [P, ...] what
    each keeps; update_bits [rounds so far], the weight of each round's update broadcast, 0 where there was none;
    schedule, what an asynchronous one keeps besides. Up to `settled_round` the rounds are written down already, so that
    playing them again must give what it gave. `resumed_after` is the last round before the run was taken up again the
    last time, 0 where it never was: keys that die with a process are as old as that.
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
    schedule: Arrays = field(default_factory=dict)
    settled_round: int = 0
    resumed_after: int = 0


class Interrupted(KeyboardInterrupt):
    """The runs that were played were stopped; `states` has what the last finished round of each left."""

    def __init__(self, states: Sequence[RunState]) -> None:
        super().__init__()
        self.states = states


@dataclass
class LiveState:
    """A run in the midst of its rounds: changes in place, unlike `RunState`, so that a round costs its cohort only.

    `kept_at` is when the last snapshot was taken, by the monotonic clock. `resumed_after` are the rounds after which
    the run was taken up: the time before, as it stands in the state, and this time; 0 where it was begun.
    """

    round_index: int
    server: Arrays
    population: Population
    update_bits: list[int]
    uplink_bits: int
    downlink_bits: int
    simulated_seconds: float
    schedule: Arrays
    resumed_after: tuple[int, int] = (0, 0)
    kept_at: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, state: RunState, algorithm: Algorithm, task: Task) -> LiveState:
        """Go on from what was kept."""
        population = Population.fresh(algorithm.init_clients(task), task.data.n_clients)
        population.put(state.participants, state.clients)
        population.last_round[state.participants] = state.last_round
        return cls(
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

    def keys_since(self) -> int:
        """After which round the keys of the coming one were made; a round that is played again has those it had."""
        before, now = self.resumed_after
        return now if self.round_index >= now else before

    def snapshot(self) -> RunState:
        """What has to be kept to go on from here."""
        self.kept_at = time.monotonic()
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
    """The part of a round in which it may be stopped, since it changes nothing yet; `Interrupted` where it is."""
    try:
        with interruptible():
            yield
    except KeyboardInterrupt:
        raise Interrupted([each.snapshot() for each in runs]) from None
