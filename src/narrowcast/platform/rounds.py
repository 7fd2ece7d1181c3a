"""The round loop: a generator that knows algorithms, models and executors only by their contracts."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from narrowcast.platform.contracts import (
    Algorithm,
    BitBudgeted,
    Broadcast,
    Executor,
    Gathers,
    KeepsSecrets,
    LinkAllocation,
    Split,
    StalenessWeighted,
    Task,
)
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.plan import Plan
from narrowcast.platform.population import Population
from narrowcast.platform.round_timing import Timing
from narrowcast.platform.sampling import cohort_size, drawn_from, next_in, rotation_of
from narrowcast.platform.seeds import generator
from narrowcast.platform.simulation.stragglers import (
    OpenRound,
    chunks_with_late,
    either,
    predict_stragglers,
    renewed,
    upload_bits,
    weigh,
    who_is_late,
)
from narrowcast.platform.state import LiveState, RunState, stoppable
from narrowcast.platform.threads import one_thread
from narrowcast.platform.types import (
    NO_RANK,
    Arrays,
    BoolArray,
    Chunk,
    ChunkResult,
    FloatArray,
    IntArray,
    RoundLedger,
    RoundRecord,
)


@dataclass(frozen=True)
class Outcome:
    """What a round gives to the code around the loop; `state` only where a checkpoint is due."""

    record: RoundRecord
    ledger: RoundLedger
    metrics: Mapping[str, float]
    wall_seconds: float
    state: RunState | None
    timing: Timing = field(default_factory=Timing)

    def timed(self, moments: Sequence[float], results: Sequence[ChunkResult], share: float = 1.0) -> Outcome:
        """The same with the wall time of its parts, of which this run had such a share; see `Timing.of`."""
        timing = Timing.of(moments, results, self.timing.evaluate, share)
        return replace(self, wall_seconds=share * (moments[-1] - moments[0]), timing=timing)


class Backend(Protocol):
    """Where a run lives: this process, or a cluster that it starts or joins and leaves again."""

    @property
    def kind(self) -> str:
        """Its name in the catalog."""
        ...

    def check(self, plan: Plan, task: Task) -> None:
        """Raise a `UserError` where the backend, or the device, cannot be had, before anything is written."""
        ...

    def run(self, plan: Plan, algorithm: Algorithm, task: Task, state: RunState) -> Generator[Outcome, None, None]:
        """Play the rounds that `state` has not seen; clean up after the last, or when the iterator is closed."""
        ...


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
    """Play the rounds that `state` has not seen yet, one `Outcome` each; `Interrupted` where it is stopped in one."""
    progress = LiveState.of(state, algorithm, task)
    order = rotation(plan, task.data.n_clients)
    while progress.round_index < plan.rounds:
        began = time.perf_counter()
        with one_thread():
            opened = open_round(plan, algorithm, task, progress, order)
            ready = time.perf_counter()
            with stoppable(progress):
                results = executor.train(opened.broadcast.arrays, opened.chunks)
                if again := chunks_with_late(plan, task, opened, results):
                    results = renewed(results, executor.train(opened.broadcast.arrays, again))
                trained = time.perf_counter()
                if isinstance(executor, Gathers):
                    results = executor.gather(results)
            outcome = close_round(plan, algorithm, task, progress, opened, results)
        yield outcome.timed((began, ready, trained, time.perf_counter()), results)


def due(round_index: int, every: int, last: int) -> bool:
    """Whether something that happens every so many rounds happens after this one."""
    return round_index % every == 0 or round_index == last


def check_plan(plan: Plan, algorithm: Algorithm, task: Task) -> None:
    """Raise a `UserError` where the plan fits neither the clients nor what they send."""
    plan.availability.check(task.data.n_clients)
    buffers = plan.schedule.kind == "buffered"
    if buffers and not isinstance(algorithm, StalenessWeighted):
        raise UserError(f"schedule = buffered: {algorithm.kind} cannot count stale updates less; use fedavg or fedprox")
    if buffers or plan.stragglers == "partial":
        nobody = np.empty(0, dtype=np.int64)
        if upload_bits(algorithm, algorithm.broadcast(algorithm.init(task), task, 1), task, nobody) is None:
            setting, advice = ("schedule = buffered", "synchronous") if buffers else ("stragglers = partial", "drop")
            raise UserError(
                f"{setting}: how long the clients of {algorithm.kind} take here is known only after their training; "
                f"use {advice}, or fedavg without a codec"
            )


def open_round(plan: Plan, algorithm: Algorithm, task: Task, progress: LiveState, order: IntArray) -> OpenRound:
    """Sample the cohort, see what its links give, cut it into chunks, whose size is the experiment's, and broadcast."""
    round_index = progress.round_index + 1
    free = plan.availability.free(task.data.n_clients, plan.seed, round_index, progress.simulated_seconds)
    cohort = np.sort(sample_cohort(plan, order, round_index, free))
    link_allocation = allocate_links(plan, algorithm, task, cohort, round_index)
    broadcast = algorithm.broadcast(progress.server, task, round_index)
    downlink_bits, renewed_bits = downloads(plan, progress, broadcast, cohort), np.zeros(len(cohort), dtype=np.int64)
    if isinstance(algorithm, KeepsSecrets):
        relayed_bits = algorithm.relayed_bits(task, cohort, round_index, link_allocation.budget_bits)
        first, renewed_bits = key_bits(algorithm, task, progress, cohort)
        downlink_bits = downlink_bits + relayed_bits + first
    rates = link_allocation.downlink_bits_per_second
    radio = plan.radio if len(cohort) else None
    download_seconds = radio.download_seconds(downlink_bits, rates) if radio else downlink_bits / rates
    # The virtual clock does not see that a run was interrupted, or its results would depend on that.
    opened = OpenRound(
        round_index, cohort, link_allocation, broadcast, downlink_bits + renewed_bits, download_seconds, []
    )
    epochs, late = predict_stragglers(plan, algorithm, task, opened)
    known = replace(link_allocation, lost=either(link_allocation.lost, late))
    chunks = cut(cohort, task.data.examples, plan.chunk_size, round_index, progress.population, known, epochs)
    return replace(opened, chunks=chunks)


def key_bits(algorithm: KeepsSecrets, task: Task, progress: LiveState, cohort: IntArray) -> tuple[IntArray, IntArray]:
    """The public key for who takes part first, and for who took part before a resume made another, [C] each."""
    bits, last_round = algorithm.public_key_bits(task), progress.population.last_round[cohort]
    since = 0 if algorithm.keys_last else progress.keys_since()
    return bits * (last_round == 0), bits * ((last_round > 0) & (last_round <= since))


def allocate_links(plan: Plan, algorithm: Algorithm, task: Task, cohort: IntArray, round_index: int) -> LinkAllocation:
    """What each client's link gives it in this round."""
    profiles = task.profiles.take(cohort)
    if plan.radio is None or not len(cohort):
        return LinkAllocation(None, None, profiles.uplink_bits_per_second, profiles.downlink_bits_per_second)
    rate_distortion = algorithm.rate_distortion(task, cohort) if isinstance(algorithm, BitBudgeted) else None
    return plan.radio.share(profiles, rate_distortion, plan.seed, round_index)


def close_round(
    plan: Plan, algorithm: Algorithm, task: Task, progress: LiveState, opened: OpenRound, results: list[ChunkResult]
) -> Outcome:
    """Everything after the training; the outcome's wall time is for the caller to fill in."""
    partials = [result.partial for result in results if not result.dropped]
    server = step_server(algorithm, task, progress, opened.broadcast.arrays, partials)
    ledger = weigh(plan, task, opened, results)
    _, until = who_is_late(plan, opened, ledger.seconds, ledger.uplink_bits)
    seconds = plan.clock.round_seconds(np.minimum(ledger.seconds, until))
    if not results:
        seconds += plan.clock.idle_seconds
    now = progress.simulated_seconds + seconds
    outcome = commit(plan, algorithm, task, progress, opened.broadcast, server, results, ledger, now)
    return replace(outcome, record=replace(outcome.record, round_simulated_seconds=seconds))


def step_server(
    algorithm: Algorithm, task: Task, progress: LiveState, broadcast: Arrays, partials: list[Arrays]
) -> Arrays:
    """Fold what the chunks send in their order, and step; the server stays as it is where there are none."""
    if not partials:
        return progress.server
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is no longer finite, see below
        server = algorithm.step(progress.server, broadcast, algorithm.fold(partials))
    if not all(np.isfinite(values).all() for values in algorithm.final(server).values()):
        raise RunFailed(
            f"round {progress.round_index + 1}: the global model is no longer finite; lower training.learning_rate "
            f"(now {getattr(task.training, 'learning_rate', 'unknown')}) and run again"
        )
    return server


def commit(
    plan: Plan,
    algorithm: Algorithm,
    task: Task,
    progress: LiveState,
    broadcast: Broadcast,
    server: Arrays,
    results: list[ChunkResult],
    ledger: RoundLedger,
    now: float,
) -> Outcome:
    """Go on to the next round, at simulated second `now`, and evaluate and keep what is due."""
    before, round_index = progress.simulated_seconds, progress.round_index + 1
    for result in results:
        progress.population.put(result.ledger.client, result.state)
    progress.population.last_round[ledger.client] = round_index - ledger.staleness
    progress.update_bits.append(broadcast.update.wire_bits() if broadcast.update and results else 0)
    progress.round_index, progress.server, progress.simulated_seconds = round_index, server, now
    progress.uplink_bits += int(ledger.uplink_bits.sum())
    progress.downlink_bits += int(ledger.downlink_bits.sum())
    began = time.perf_counter()
    metrics = evaluate(algorithm, task, progress) if due(round_index, plan.evaluate_every, plan.rounds) else {}
    timing = Timing(evaluate=time.perf_counter() - began)
    # A round whose clients were dropped would come out differently if it were played again.
    must_keep = any(result.dropped for result in results)
    due_now = must_keep or plan.keeps(round_index, time.monotonic() - progress.kept_at)
    kept = progress.snapshot() if due_now else None
    return Outcome(summarise(progress, ledger, now - before), ledger, metrics, 0.0, kept, timing)


def rotation(plan: Plan, n_clients: int) -> IntArray:
    """The order in which round robin visits the clients, [U]."""
    return rotation_of(plan.sampling, plan.seed, n_clients)


def sample_cohort(plan: Plan, order: IntArray, round_index: int, free: BoolArray | None = None) -> IntArray:
    """The clients of a round, no one twice: the next in a shuffled order, or a fresh draw, of those that are free."""
    size = cohort_size(plan.clients_per_round, plan.over_selection, len(order))
    if plan.sampling == "uniform":
        return drawn_from(free, size, generator(plan.seed, "cohort", round_index), len(order))
    return next_in(order, (round_index - 1) * size, size, free)


def cut(
    cohort: IntArray,
    examples: IntArray,
    chunk_size: int,
    round_index: int,
    population: Population,
    link_allocation: LinkAllocation | None = None,
    epochs: IntArray | None = None,
) -> list[Chunk]:
    """Deal the cohort [C], largest clients first, into equal chunks of at most `chunk_size`, alike in work."""
    n_chunks = -(-len(cohort) // chunk_size)
    by_size = np.lexsort((cohort, -examples[cohort]))
    budget_bits, lost = (None, None) if link_allocation is None else (link_allocation.budget_bits, link_allocation.lost)
    return [
        Chunk(
            round_index,
            index,
            cohort[part],
            population.take(cohort[part]),
            None if budget_bits is None else budget_bits[part],
            None if lost is None else lost[part],
            None if epochs is None else epochs[part],
        )
        for index in range(n_chunks)
        for part in [_ascending(by_size[index::n_chunks], cohort)]
    ]


def _ascending(places: IntArray, cohort: IntArray) -> IntArray:
    return places[np.argsort(cohort[places])]


def downloads(plan: Plan, progress: LiveState, broadcast: Broadcast, cohort: IntArray) -> IntArray:
    """What each client of the cohort has to be sent, in bits, [C]."""
    full = np.full(len(cohort), broadcast.full.wire_bits())
    if broadcast.update is None:
        return full
    sent_before = np.cumsum([0, *progress.update_bits, broadcast.update.wire_bits()])
    last_round = progress.population.last_round[cohort]
    missed = last_round if plan.downlink == "catch_up" else len(progress.update_bits)
    follows = last_round > 0 if plan.downlink == "catch_up" else np.array(True)
    return np.where(follows, np.minimum(sent_before[-1] - sent_before[missed], full), full)


def summarise(progress: LiveState, ledger: RoundLedger, seconds: float) -> RoundRecord:
    """The round as one flat row."""
    ranks = ledger.rank[ledger.rank != NO_RANK]
    return RoundRecord(
        round=progress.round_index,
        clients=len(ledger.client),
        delivered=int(ledger.delivered.sum()),
        late=int(ledger.late.sum()),
        loss=_mean(ledger.loss[ledger.delivered]),
        mean_rank=_mean(ranks) if len(ranks) else None,
        mean_staleness=_mean(ledger.staleness),
        uplink_bits=int(ledger.uplink_bits.sum()),
        downlink_bits=int(ledger.downlink_bits.sum()),
        total_uplink_bits=progress.uplink_bits,
        total_downlink_bits=progress.downlink_bits,
        round_simulated_seconds=seconds,
        simulated_seconds=progress.simulated_seconds,
    )


def _mean(values: IntArray | FloatArray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def evaluate(algorithm: Algorithm, task: Task, progress: LiveState) -> dict[str, float]:
    """All metrics of both held-out splits, named `split.metric`."""
    model, clients = algorithm.final(progress.server), progress.population.arrays
    splits: tuple[Split, Split] = ("validation", "test")
    return {
        f"{split}.{name}": value
        for split in splits
        for name, value in task.model.evaluate(model, clients, task.data, split).items()
    }


def measure(algorithm: Algorithm, task: Task, state: RunState) -> dict[str, float]:
    """What `evaluate` gives of a state as it is kept."""
    return evaluate(algorithm, task, LiveState.of(state, algorithm, task))


def model_sha256(algorithm: Algorithm, state: RunState) -> str:
    """The sha256 of the global parameters and of what the clients that took part keep."""
    hasher = hashlib.sha256()
    for owner, arrays in (("server", algorithm.final(state.server)), ("clients", state.clients)):
        for name in sorted(arrays):
            values = np.ascontiguousarray(arrays[name])
            hasher.update(f"{owner}\0{name}\0{values.dtype.str}\0{values.shape}\0".encode())
            hasher.update(values.reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()
