"""The round loop: a generator that knows algorithms, models and executors only by their contracts."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from narrowcast.platform.clock import Clock
from narrowcast.platform.contracts import Algorithm, Broadcast, Executor, Task
from narrowcast.platform.errors import RunFailed
from narrowcast.platform.seeds import generator
from narrowcast.platform.threads import one_thread
from narrowcast.platform.types import (
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

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = Field(0, ge=0, lt=2**63)
    rounds: int = Field(100, ge=1)
    clients_per_round: int = Field(60, ge=1, description="the whole fleet where it is smaller")
    sampling: Literal["round_robin", "uniform"] = "round_robin"
    chunk_size: int = Field(30, ge=1, description="most clients trained as one tensor program; results depend on it")
    downlink: Literal["catch_up", "every_round"] = "catch_up"
    clock: Clock = Clock()
    evaluate_every: int = Field(10, ge=1, description="rounds between evaluations; the last round has one")
    checkpoint_every: int = Field(10, ge=1, description="rounds between checkpoints; the last round has one")


@dataclass(frozen=True)
class RunState:
    """Everything that the next round depends on.

    Shapes: last_round [U], the last round in which a client took part, 0 for none; update_bits [rounds so far], the
    weight of each round's update broadcast, 0 where there was none.
    """

    round_index: int
    server: Arrays
    clients: Arrays
    last_round: IntArray
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

    def check(self) -> None:
        """Raise a `UserError` where the runtime cannot be had, before anything is written."""
        ...

    def play(self, plan: Plan, algorithm: Algorithm, task: Task, state: RunState) -> Generator[Outcome, None, None]:
        """Play the rounds that `state` has not seen; clean up after the last, or when the iterator is closed."""
        ...


def start(algorithm: Algorithm, task: Task) -> RunState:
    """The state before round 1."""
    return RunState(
        round_index=0,
        server=algorithm.init(task),
        clients=task.model.init_clients(task.data, task.seed),
        last_round=np.zeros(task.data.n_users, dtype=np.int64),
        update_bits=np.zeros(0, dtype=np.int64),
        uplink_bits=0,
        downlink_bits=0,
        simulated_seconds=0.0,
    )


def rounds(
    plan: Plan, algorithm: Algorithm, task: Task, executor: Executor, state: RunState
) -> Generator[Outcome, None, None]:
    """Play the rounds that `state` has not seen yet, one `Outcome` each."""
    while state.round_index < plan.rounds:
        began = time.perf_counter()
        with one_thread():
            state, record, ledger = play(plan, algorithm, task, executor, state)
            metrics = {}
            if due(state.round_index, plan.evaluate_every, plan.rounds):
                metrics = evaluate(algorithm, task, state)
        checkpoint = due(state.round_index, plan.checkpoint_every, plan.rounds)
        yield Outcome(record, ledger, metrics, time.perf_counter() - began, state if checkpoint else None)


def due(round_index: int, every: int, last: int) -> bool:
    """Whether something that happens every so many rounds happens after this one."""
    return round_index % every == 0 or round_index == last


def play(
    plan: Plan, algorithm: Algorithm, task: Task, executor: Executor, state: RunState
) -> tuple[RunState, RoundRecord, RoundLedger]:
    """Play one round."""
    round_index = state.round_index + 1

    # 1. Sample the cohort and cut it into chunks, whose size belongs to the experiment.
    cohort = sample_cohort(plan, task.data.n_users, round_index)
    chunks = cut(cohort, task.data.examples, plan.chunk_size, round_index, state.clients)

    # 2. Broadcast, train, and fold the partial sums in the order of the chunks.
    broadcast = algorithm.broadcast(state.server, task, round_index)
    results = executor.train(broadcast.arrays, chunks)
    server = algorithm.step(state.server, broadcast.arrays, fold(results))
    if not all(np.isfinite(values).all() for values in algorithm.final(server).values()):
        raise RunFailed(
            f"round {round_index}: the global model is no longer finite; lower training.learning_rate "
            f"(now {getattr(task.training, 'learning_rate', 'unknown')}) and run again"
        )

    # 3. Commit what the clients learnt, once.
    clients = {name: values.copy() for name, values in state.clients.items()}
    for result in results:
        for name, values in result.state.items():
            clients[name][result.ledger.client] = values

    # 4. Weigh what was sent and let the virtual clock run.
    update_bits = np.append(state.update_bits, broadcast.update.wire_bits() if broadcast.update else 0)
    ledger = weigh(plan, task, state, broadcast, update_bits, results)
    seconds = plan.clock.round_seconds(ledger.seconds)
    last_round = state.last_round.copy()
    last_round[ledger.client] = round_index
    state = RunState(
        round_index=round_index,
        server=server,
        clients=clients,
        last_round=last_round,
        update_bits=update_bits,
        uplink_bits=state.uplink_bits + int(ledger.uplink_bits.sum()),
        downlink_bits=state.downlink_bits + int(ledger.downlink_bits.sum()),
        simulated_seconds=state.simulated_seconds + seconds,
    )
    return state, summarise(state, ledger, seconds), ledger


def sample_cohort(plan: Plan, n_clients: int, round_index: int) -> IntArray:
    """The clients of a round, without repeats: a shuffled list rotated round by round, or a fresh draw."""
    size = min(plan.clients_per_round, n_clients)
    if plan.sampling == "uniform":
        return generator(plan.seed, "cohort", round_index).choice(n_clients, size, replace=False)
    order = generator(plan.seed, "cohort").permutation(n_clients)
    return order[((round_index - 1) * size + np.arange(size)) % n_clients]


def cut(cohort: IntArray, examples: IntArray, chunk_size: int, round_index: int, state: Arrays) -> list[Chunk]:
    """Deal the cohort, largest clients first, into equal chunks of at most `chunk_size`, alike in work."""
    n_chunks = -(-len(cohort) // chunk_size)
    by_size = cohort[np.lexsort((cohort, -examples[cohort]))]
    parts = (np.sort(by_size[index::n_chunks]) for index in range(n_chunks))
    return [
        Chunk(round_index, index, part, {name: values[part] for name, values in state.items()})
        for index, part in enumerate(parts)
    ]


def fold(results: list[ChunkResult]) -> Arrays:
    """Add up the chunks' partial sums in their order, so that rounding does not depend on who was fast."""
    total = {name: values.copy() for name, values in results[0].partial.items()}
    for result in results[1:]:
        for name, values in result.partial.items():
            total[name] += values
    return total


def weigh(
    plan: Plan,
    task: Task,
    state: RunState,
    broadcast: Broadcast,
    update_bits: IntArray,
    results: list[ChunkResult],
) -> RoundLedger:
    """What each client of the round received, computed and sent, in ascending order of clients."""
    parts = [result.ledger for result in results]
    client = np.concatenate([part.client for part in parts])
    order = np.argsort(client)

    def column(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(part, name) for part in parts])[order]

    client, examples, uplink_bits = client[order], column("examples"), column("uplink_bits")
    downlink_bits = np.full(len(client), broadcast.full.wire_bits())
    if broadcast.update is not None:
        missed = state.last_round[client] if plan.downlink == "catch_up" else len(update_bits) - 1
        sent_before = np.concatenate([[0], np.cumsum(update_bits)])
        updates = sent_before[-1] - sent_before[missed]
        follows = state.last_round[client] > 0 if plan.downlink == "catch_up" else np.array(True)
        downlink_bits = np.where(follows, np.minimum(updates, downlink_bits), downlink_bits)
    seconds = plan.clock.client_seconds(task.profiles.take(client), examples, downlink_bits, uplink_bits)
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


def summarise(state: RunState, ledger: RoundLedger, seconds: float) -> RoundRecord:
    """The round as one flat row."""
    return RoundRecord(
        round=state.round_index,
        clients=len(ledger.client),
        delivered=int(ledger.delivered.sum()),
        loss=_mean(ledger.loss[ledger.delivered]),
        mean_rank=_mean(ledger.rank),
        uplink_bits=int(ledger.uplink_bits.sum()),
        downlink_bits=int(ledger.downlink_bits.sum()),
        total_uplink_bits=state.uplink_bits,
        total_downlink_bits=state.downlink_bits,
        round_simulated_seconds=seconds,
        simulated_seconds=state.simulated_seconds,
    )


def _mean(values: IntArray | FloatArray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def evaluate(algorithm: Algorithm, task: Task, state: RunState) -> dict[str, float]:
    """All metrics of both held-out splits, named `split.metric`."""
    model = algorithm.final(state.server)
    return {
        f"{split}.{name}": value
        for split in ("validation", "test")
        for name, value in task.model.evaluate(model, state.clients, task.data, split).items()
    }


def model_sha256(algorithm: Algorithm, state: RunState) -> str:
    """The sha256 of the global parameters and of all clients' private state."""
    hasher = hashlib.sha256()
    for owner, arrays in (("server", algorithm.final(state.server)), ("clients", state.clients)):
        for name in sorted(arrays):
            values = np.ascontiguousarray(arrays[name])
            hasher.update(f"{owner}\0{name}\0{values.dtype.str}\0{values.shape}\0".encode())
            hasher.update(values.tobytes())
    return hasher.hexdigest()
