"""The loop without rounds: the server steps whenever enough updates have come in, on the same virtual clock.

A client trains when it arrives, which is what it would have done meanwhile: what it took along is kept, and nobody else
touches its state. So those of a step that took the same version along train as chunks, like a cohort.
"""

from __future__ import annotations

import time
from collections.abc import Generator

import numpy as np

from narrowcast.platform.contracts import Algorithm, Broadcast, Executor, StalenessWeighted, Task
from narrowcast.platform.in_flight import Airspace, Flights
from narrowcast.platform.plan import Plan
from narrowcast.platform.rounds import Outcome, commit, cut, downloads, rotation, step_server
from narrowcast.platform.sampling import drawn_from, next_in
from narrowcast.platform.schedule import Buffered
from narrowcast.platform.seeds import generator
from narrowcast.platform.simulation.stragglers import given_up, upload_bits
from narrowcast.platform.state import LiveState, RunState, stoppable
from narrowcast.platform.threads import one_thread
from narrowcast.platform.types import Arrays, ChunkResult, ClientLedger, IntArray, RoundLedger


def buffered(
    plan: Plan, schedule: Buffered, algorithm: Algorithm, task: Task, executor: Executor, state: RunState
) -> Generator[Outcome, None, None]:
    """Play the steps that `state` has not seen yet, one `Outcome` each; `Interrupted` where it is stopped in one."""
    progress = LiveState.of(state, algorithm, task)
    order = rotation(plan, task.data.n_clients)
    air = Airspace.of(progress.schedule)
    while progress.round_index < plan.rounds:
        began = time.perf_counter()
        with one_thread():
            broadcast = algorithm.broadcast(progress.server, task, progress.round_index + 1)
            air, now = wait(plan, schedule, algorithm, task, progress, order, broadcast, air)
            landed = air.flights.take(air.flights.arrives_at <= now).take(slice(schedule.buffer_size))
            ready = time.perf_counter()
            with stoppable(progress):
                results, partials = train(plan, schedule, algorithm, task, executor, progress, air, landed)
            trained = time.perf_counter()
            air = air.without_first(len(landed))
            progress.schedule = air.kept()
            server = step_server(algorithm, task, progress, broadcast.arrays, partials)
            ledger = weigh_landed(results, landed, progress.round_index)
            now += plan.clock.server_seconds if len(landed) else plan.clock.idle_seconds
            outcome = commit(plan, algorithm, task, progress, broadcast, server, results, ledger, now)
        yield outcome.timed((began, ready, trained, time.perf_counter()), results)


def wait(
    plan: Plan,
    schedule: Buffered,
    algorithm: Algorithm,
    task: Task,
    progress: LiveState,
    order: IntArray,
    broadcast: Broadcast,
    air: Airspace,
) -> tuple[Airspace, float]:
    """Send clients out until a buffer is full, or nobody is at work; who is out then, and the simulated second."""
    now = progress.simulated_seconds
    while (air.flights.arrives_at <= now).sum() < schedule.buffer_size:
        at_work = int((air.flights.arrives_at > now).sum())
        clients = next_clients(plan, task, progress, order, air, schedule.concurrency - at_work, now)
        departing = depart(plan, algorithm, task, progress, broadcast, clients, now)
        air = air.send(departing, progress.round_index, broadcast.arrays)
        still_out = air.flights.arrives_at > now
        if still_out.any():
            now = float(air.flights.arrives_at[still_out].min())
        elif not len(departing):
            break
    return air, now


def next_clients(
    plan: Plan, task: Task, progress: LiveState, order: IntArray, air: Airspace, count: int, now: float
) -> IntArray:
    """Whom to send out, ascending: clients that are available and not out, nor waiting in the buffer."""
    n_clients, step = task.data.n_clients, progress.round_index + 1
    free = plan.availability.free(n_clients, plan.seed, step, now)
    if len(air.flights):
        free = np.ones(n_clients, dtype=bool) if free is None else free
        free[air.flights.client] = False
    count = min(count, n_clients)
    if plan.sampling == "round_robin":
        return np.sort(next_in(order, air.sent_out, count, free))
    of_this_version = int((air.flights.version == progress.round_index).sum())
    return np.sort(drawn_from(free, count, generator(plan.seed, "cohort", step, of_this_version), n_clients))


def depart(
    plan: Plan,
    algorithm: Algorithm,
    task: Task,
    progress: LiveState,
    broadcast: Broadcast,
    clients: IntArray,
    now: float,
) -> Flights:
    """The flights of some clients that start now, with what the server has now."""
    uplink_bits = upload_bits(algorithm, broadcast, task, clients)
    assert uplink_bits is not None, "check_plan() has seen to it"
    profiles, downlink_bits = task.profiles.take(clients), downloads(plan, progress, broadcast, clients)
    seconds = plan.clock.client_seconds(
        profiles,
        task.training.samples(task, clients) * task.training.epochs,
        downlink_bits / profiles.downlink_bits_per_second,
        uplink_bits / profiles.uplink_bits_per_second,
    )
    return Flights(clients, np.full(len(clients), progress.round_index), now + seconds, seconds, downlink_bits)


def train(
    plan: Plan,
    schedule: Buffered,
    algorithm: Algorithm,
    task: Task,
    executor: Executor,
    progress: LiveState,
    air: Airspace,
    landed: Flights,
) -> tuple[list[ChunkResult], list[Arrays]]:
    """Train who has landed, version by version; their results, and their partial sums as they count by now."""
    assert isinstance(algorithm, StalenessWeighted), "check_plan() has seen to it"
    results: list[ChunkResult] = []
    partials: list[Arrays] = []
    for version in np.unique(landed.version).tolist():
        clients = np.sort(landed.client[landed.version == version])
        chunks = cut(clients, task.data.examples, plan.chunk_size, version + 1, progress.population)
        trained = executor.train(air.versions[version], chunks)
        staleness = progress.round_index - version
        factor = (1.0 + staleness) ** -schedule.staleness_exponent
        results += trained
        arrived = [each.partial for each in trained if not each.dropped]
        partials += [algorithm.weighted_by_staleness(each, factor) if staleness else each for each in arrived]
    return results, partials


def weigh_landed(results: list[ChunkResult], landed: Flights, version: int) -> RoundLedger:
    """What each client that landed received, computed and sent, in ascending order of clients."""
    landed = landed.take(np.argsort(landed.client))
    return RoundLedger(
        **vars(ClientLedger.merged([result.ledger for result in results])),
        downlink_bits=landed.downlink_bits,
        seconds=landed.seconds,
        late=given_up(results, landed.client),
        staleness=version - landed.version,
    )
