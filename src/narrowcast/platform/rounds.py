"""The round loop: a generator that knows algorithms, models and executors only by their contracts."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from narrowcast.platform.clock import Clock
from narrowcast.platform.contracts import Adapts, Algorithm, Allotment, Broadcast, Executor, Radio, Split, Task
from narrowcast.platform.errors import RunFailed
from narrowcast.platform.population import Population
from narrowcast.platform.seeds import generator
from narrowcast.platform.threads import one_thread
from narrowcast.platform.types import (
    NO_RANK,
    Arrays,
    Chunk,
    ChunkResult,
    FloatArray,
    IntArray,
    RoundLedger,
    RoundRecord,
)


class Plan(BaseModel):
    """How many rounds, of which clients, and how the rounds are counted.

    `downlink: catch_up` charges each client the rounds it missed, or the whole model where that is less; `every_round`
    takes it that all clients listen to every broadcast and charges the cohort one round's update, as the paper does.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    seed: int = Field(0, ge=0, lt=2**63)
    rounds: int = Field(100, ge=1)
    clients_per_round: int = Field(60, ge=1, description="the whole fleet where it is smaller")
    sampling: Literal["round_robin", "uniform"] = "round_robin"
    chunk_size: int = Field(30, ge=1, description="most clients trained as one tensor program; results depend on it")
    downlink: Literal["catch_up", "every_round"] = "catch_up"
    clock: Clock = Clock()
    radio: Radio | None = Field(None, description="none: the links of the fleet, as they are")
    evaluate_every: int = Field(10, ge=1, description="rounds between evaluations; the last round has one")
    checkpoint_every: int = Field(10, ge=1, description="rounds between checkpoints; the last round has one")


@dataclass(frozen=True)
class RunState:
    """Everything that the next round depends on, as it is kept; clients that never took part are as they started.

    Shapes: participants [P] ascending; last_round [P], the last round in which each took part; clients [P, ...] what
    each keeps; update_bits [rounds so far], the weight of each round's update broadcast, 0 where there was none.
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


@dataclass(frozen=True)
class Outcome:
    """What a round gives to the code around the loop; `state` only where a checkpoint is due."""

    record: RoundRecord
    ledger: RoundLedger
    metrics: Mapping[str, float]
    wall_seconds: float
    state: RunState | None


class Runtime(Protocol):
    """Where a run lives: this process, or a cluster that it starts or joins and leaves again."""

    @property
    def kind(self) -> str:
        """Its name in the catalog."""
        ...

    def check(self, task: Task) -> None:
        """Raise a `UserError` where the runtime, or the device, cannot be had, before anything is written."""
        ...

    def play(self, plan: Plan, algorithm: Algorithm, task: Task, state: RunState) -> Generator[Outcome, None, None]:
        """Play the rounds that `state` has not seen; clean up after the last, or when the iterator is closed."""
        ...


@dataclass
class Progress:
    """A run in the midst of its rounds: changes in place, unlike `RunState`, so that a round costs its cohort only."""

    round_index: int
    server: Arrays
    population: Population
    update_bits: list[int]
    uplink_bits: int
    downlink_bits: int
    simulated_seconds: float

    @classmethod
    def of(cls, state: RunState, algorithm: Algorithm, task: Task) -> Progress:
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
        )

    def snapshot(self) -> RunState:
        """What has to be kept to go on from here."""
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
        )


def start(algorithm: Algorithm, task: Task) -> RunState:
    """The state before round 1."""
    nobody = np.empty(0, dtype=np.int64)
    return RunState(
        round_index=0,
        server=algorithm.init(task),
        participants=nobody,
        last_round=nobody,
        clients={name: values[:0] for name, values in algorithm.init_clients(task).items()},
        update_bits=nobody,
        uplink_bits=0,
        downlink_bits=0,
        simulated_seconds=0.0,
    )


def rounds(
    plan: Plan, algorithm: Algorithm, task: Task, executor: Executor, state: RunState
) -> Generator[Outcome, None, None]:
    """Play the rounds that `state` has not seen yet, one `Outcome` each."""
    progress = Progress.of(state, algorithm, task)
    order = rotation(plan, task.data.n_clients)
    while progress.round_index < plan.rounds:
        began = time.perf_counter()
        with one_thread():
            opened = open_round(plan, algorithm, task, progress, order)
            results = executor.train(opened.broadcast.arrays, opened.chunks)
            outcome = close_round(plan, algorithm, task, progress, opened, results)
        yield replace(outcome, wall_seconds=time.perf_counter() - began)


def due(round_index: int, every: int, last: int) -> bool:
    """Whether something that happens every so many rounds happens after this one."""
    return round_index % every == 0 or round_index == last


@dataclass(frozen=True)
class OpenRound:
    """A round up to the training: who takes part over which links, what the server sends, and the chunks."""

    round_index: int
    cohort: IntArray
    allotment: Allotment
    broadcast: Broadcast
    chunks: list[Chunk]


def open_round(plan: Plan, algorithm: Algorithm, task: Task, progress: Progress, order: IntArray) -> OpenRound:
    """Sample the cohort, see what its links give, cut it into chunks, whose size is the experiment's, and broadcast."""
    round_index = progress.round_index + 1
    cohort = np.sort(sample_cohort(plan, order, round_index))
    allotment = allot(plan, algorithm, task, cohort, round_index)
    chunks = cut(cohort, task.data.examples, plan.chunk_size, round_index, progress.population, allotment)
    broadcast = algorithm.broadcast(progress.server, task, round_index)
    return OpenRound(round_index, cohort, allotment, broadcast, chunks)


def allot(plan: Plan, algorithm: Algorithm, task: Task, cohort: IntArray, round_index: int) -> Allotment:
    """What each client's link gives it in this round."""
    profiles = task.profiles.take(cohort)
    if plan.radio is None:
        return Allotment(None, None, profiles.uplink_bits_per_second, profiles.downlink_bits_per_second)
    wishes = algorithm.wishes(task, cohort) if isinstance(algorithm, Adapts) else None
    return plan.radio.share(profiles, wishes, plan.seed, round_index)


def close_round(
    plan: Plan, algorithm: Algorithm, task: Task, progress: Progress, opened: OpenRound, results: list[ChunkResult]
) -> Outcome:
    """Everything after the training; the outcome's `wall_seconds` are for the caller to fill in."""
    round_index, broadcast = opened.round_index, opened.broadcast

    # 1. Fold what the chunks send in the order of the chunks, and step.
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is no longer finite, see below
        total = algorithm.fold([result.partial for result in results])
        server = algorithm.step(progress.server, broadcast.arrays, total)
    if not all(np.isfinite(values).all() for values in algorithm.final(server).values()):
        raise RunFailed(
            f"round {round_index}: the global model is no longer finite; lower training.learning_rate "
            f"(now {getattr(task.training, 'learning_rate', 'unknown')}) and run again"
        )

    # 2. Weigh what was sent and let the virtual clock run.
    progress.update_bits.append(broadcast.update.wire_bits() if broadcast.update else 0)
    ledger = weigh(plan, task, progress, opened, results)
    seconds = plan.clock.round_seconds(ledger.seconds)

    # 3. Commit the round, once.
    for result in results:
        progress.population.put(result.ledger.client, result.state)
    progress.population.last_round[ledger.client] = round_index
    progress.round_index, progress.server = round_index, server
    progress.uplink_bits += int(ledger.uplink_bits.sum())
    progress.downlink_bits += int(ledger.downlink_bits.sum())
    progress.simulated_seconds += seconds

    # 4. Evaluate and keep what is due.
    metrics = evaluate(algorithm, task, progress) if due(round_index, plan.evaluate_every, plan.rounds) else {}
    kept = progress.snapshot() if due(round_index, plan.checkpoint_every, plan.rounds) else None
    return Outcome(summarise(progress, ledger, seconds), ledger, metrics, 0.0, kept)


def rotation(plan: Plan, n_clients: int) -> IntArray:
    """The order in which round robin visits the clients, [U]."""
    if plan.sampling == "uniform":
        return np.arange(n_clients)
    return generator(plan.seed, "cohort").permutation(n_clients)


def sample_cohort(plan: Plan, order: IntArray, round_index: int) -> IntArray:
    """The clients of a round, without repeats: the next in a shuffled order, or a fresh draw."""
    n_clients = len(order)
    size = min(plan.clients_per_round, n_clients)
    if plan.sampling == "uniform":
        return generator(plan.seed, "cohort", round_index).choice(n_clients, size, replace=False)
    return order[((round_index - 1) * size + np.arange(size)) % n_clients]


def cut(
    cohort: IntArray,
    examples: IntArray,
    chunk_size: int,
    round_index: int,
    population: Population,
    allotment: Allotment | None = None,
) -> list[Chunk]:
    """Deal the cohort [C], largest clients first, into equal chunks of at most `chunk_size`, alike in work."""
    n_chunks = -(-len(cohort) // chunk_size)
    by_size = np.lexsort((cohort, -examples[cohort]))
    budget_bits, lost = (None, None) if allotment is None else (allotment.budget_bits, allotment.lost)
    return [
        Chunk(
            round_index,
            index,
            cohort[part],
            population.take(cohort[part]),
            None if budget_bits is None else budget_bits[part],
            None if lost is None else lost[part],
        )
        for index in range(n_chunks)
        for part in [_ascending(by_size[index::n_chunks], cohort)]
    ]


def _ascending(places: IntArray, cohort: IntArray) -> IntArray:
    return places[np.argsort(cohort[places])]


def weigh(
    plan: Plan,
    task: Task,
    progress: Progress,
    opened: OpenRound,
    results: list[ChunkResult],
) -> RoundLedger:
    """What each client of the round received, computed and sent, in ascending order of clients."""
    broadcast, allotment = opened.broadcast, opened.allotment
    parts = [result.ledger for result in results]
    client = np.concatenate([part.client for part in parts])
    order = np.argsort(client)

    def column(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(part, name) for part in parts])[order]

    client, examples, uplink_bits = client[order], column("examples"), column("uplink_bits")
    downlink_bits = np.full(len(client), broadcast.full.wire_bits())
    if broadcast.update is not None:
        last_round = progress.population.last_round[client]
        missed = last_round if plan.downlink == "catch_up" else len(progress.update_bits) - 1
        sent_before = np.concatenate([[0], np.cumsum(progress.update_bits)])
        updates = sent_before[-1] - sent_before[missed]
        follows = last_round > 0 if plan.downlink == "catch_up" else np.array(True)
        downlink_bits = np.where(follows, np.minimum(updates, downlink_bits), downlink_bits)
    rates = allotment.downlink_bits_per_second
    download_seconds = plan.radio.download_seconds(downlink_bits, rates) if plan.radio else downlink_bits / rates
    upload_seconds = uplink_bits / allotment.uplink_bits_per_second
    seconds = plan.clock.client_seconds(task.profiles.take(client), examples, download_seconds, upload_seconds)
    return RoundLedger(
        client=client,
        rank=column("rank"),
        uplink_bits=uplink_bits,
        downlink_bits=downlink_bits,
        examples=examples,
        seconds=seconds,
        loss=column("loss"),
        delivered=column("delivered"),
    )


def summarise(progress: Progress, ledger: RoundLedger, seconds: float) -> RoundRecord:
    """The round as one flat row."""
    ranks = ledger.rank[ledger.rank != NO_RANK]
    return RoundRecord(
        round=progress.round_index,
        clients=len(ledger.client),
        delivered=int(ledger.delivered.sum()),
        loss=_mean(ledger.loss[ledger.delivered]),
        mean_rank=_mean(ranks) if len(ranks) else None,
        uplink_bits=int(ledger.uplink_bits.sum()),
        downlink_bits=int(ledger.downlink_bits.sum()),
        total_uplink_bits=progress.uplink_bits,
        total_downlink_bits=progress.downlink_bits,
        round_simulated_seconds=seconds,
        simulated_seconds=progress.simulated_seconds,
    )


def _mean(values: IntArray | FloatArray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def evaluate(algorithm: Algorithm, task: Task, progress: Progress) -> dict[str, float]:
    """All metrics of both held-out splits, named `split.metric`."""
    model, clients = algorithm.final(progress.server), progress.population.arrays
    splits: tuple[Split, Split] = ("validation", "test")
    return {
        f"{split}.{name}": value
        for split in splits
        for name, value in task.model.evaluate(model, clients, task.data, split).items()
    }


def model_sha256(algorithm: Algorithm, state: RunState) -> str:
    """The sha256 of the global parameters and of what the clients that took part keep."""
    hasher = hashlib.sha256()
    for owner, arrays in (("server", algorithm.final(state.server)), ("clients", state.clients)):
        for name in sorted(arrays):
            values = np.ascontiguousarray(arrays[name])
            hasher.update(f"{owner}\0{name}\0{values.dtype.str}\0{values.shape}\0".encode())
            hasher.update(values.tobytes())
    return hasher.hexdigest()
