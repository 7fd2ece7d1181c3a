"""A step of the buffered asynchronous schedule: the server steps whenever enough updates have arrived.

A client trains when its update arrives, with the result that it would have had before: the model that it was sent is
kept, and no other step touches its state. Clients of a step that were sent the same version train as chunks, like a
cohort.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from narrowcast.platform.contracts import Broadcast
from narrowcast.platform.rounds.chunks import TrainingCall, make_chunks
from narrowcast.platform.rounds.closing import commit, step_server
from narrowcast.platform.rounds.ledger import ChunkResult, ClientLedger, RoundLedger
from narrowcast.platform.rounds.opening import download_bits, dropped_clients
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.plan import Buffered
from narrowcast.platform.rounds.sampling import Draw
from narrowcast.platform.rounds.state import AsyncState, InFlight, LiveState, Run
from narrowcast.platform.types import Arrays, Chunk, IntArray


@dataclass(frozen=True)
class OpenStep:
    """A step of the server up to its training.

    `arrived` are the clients whose updates it uses, `waiting` is the state without them, and `now` is the simulated
    second at which the last of them arrived.
    """

    run: Run
    broadcast: Broadcast
    arrived: InFlight
    waiting: AsyncState
    now: float
    calls: Sequence[TrainingCall]


def open_step(live: LiveState) -> OpenStep:
    """Dispatch clients until a buffer is full or no client is at work, and choose those whose updates are used."""
    run = live.run
    broadcast = run.algorithm.broadcast(live.server, run.task, live.round_index + 1)
    state, now = fill_buffer(live, broadcast)
    clients = state.in_flight
    arrived = clients.take(clients.arrives_at <= now).take(slice(_schedule(run).buffer_size))
    calls = [
        TrainingCall(state.broadcasts[version], _chunks(live, arrived.client[arrived.version == version], version))
        for version in np.unique(arrived.version).tolist()
    ]
    return OpenStep(run, broadcast, arrived, state.without_first(len(arrived)), now, calls)


def _schedule(run: Run) -> Buffered:
    assert isinstance(run.plan.schedule, Buffered)
    return run.plan.schedule


def _chunks(live: LiveState, clients: IntArray, version: int) -> list[Chunk]:
    examples, chunk_size = live.run.task.data.examples, live.run.plan.chunk_size
    return make_chunks(np.sort(clients), examples, chunk_size, version + 1, live.population)


def fill_buffer(live: LiveState, broadcast: Broadcast) -> tuple[AsyncState, float]:
    """Return the state and the simulated second once a buffer is full, or no client is at work or can be dispatched."""
    schedule, now = _schedule(live.run), live.simulated_seconds
    state = live.schedule or AsyncState()
    while (state.in_flight.arrives_at <= now).sum() < schedule.buffer_size:
        at_work = int((state.in_flight.arrives_at > now).sum())
        clients = next_clients(live, state, schedule.concurrency - at_work, now)
        state = state.dispatch(depart(live, broadcast, clients, now), live.round_index, broadcast.arrays)
        arrivals = state.in_flight.arrives_at[state.in_flight.arrives_at > now]
        if len(arrivals):
            now = float(arrivals.min())
        elif not len(clients):
            break
    return state, now


def next_clients(live: LiveState, state: AsyncState, count: int, now: float) -> IntArray:
    """Return the clients to dispatch, ascending: available, not at work, and not waiting in the buffer."""
    plan, n_clients, step = live.run.plan, live.run.task.data.n_clients, live.round_index + 1
    free = live.run.free(step, now)
    if len(state.in_flight):
        free = np.ones(n_clients, dtype=bool) if free is None else free
        free[state.in_flight.client] = False
    count = min(count, n_clients)
    of_this_version = int((state.in_flight.version == live.round_index).sum())
    first, examples = state.dispatched, live.run.task.data.examples
    draw = Draw(count, plan.seed, step, live.rotation, first, free, examples, part=(of_this_version,))
    return np.sort(plan.sampling.draw(draw))


def depart(live: LiveState, broadcast: Broadcast, clients: IntArray, now: float) -> InFlight:
    """Return the record of clients that are sent the present model now."""
    run, task = live.run, live.run.task
    uplink_bits = run.algorithm.upload_bits(broadcast.arrays, task, clients)
    assert uplink_bits is not None, "Run.check() has seen to it"
    profiles, downlink_bits = task.profiles.take(clients), download_bits(live, broadcast, clients)
    examples = task.training.samples(task, clients) * task.training.epochs
    work = run.algorithm.relative_work(broadcast.arrays, task, clients)
    seconds = run.plan.clock.client_seconds(
        profiles,
        examples if work is None else examples * work,
        downlink_bits / profiles.downlink_bits_per_second,
        uplink_bits / profiles.uplink_bits_per_second,
    )
    return InFlight(clients, np.full(len(clients), live.round_index), now + seconds, seconds, downlink_bits)


def close_step(live: LiveState, opened: OpenStep, results: Sequence[ChunkResult]) -> Outcome:
    """Step the server and commit; the caller fills in the outcome's wall time."""
    clock, arrived = live.run.plan.clock, opened.arrived
    stepped = step_server(live, opened.broadcast.arrays, weighted_partials(live, opened, results))
    live.schedule = opened.waiting
    now = opened.now + (clock.server_seconds if len(arrived) else clock.idle_seconds)
    ledger = account_arrived(live, arrived, results)
    return commit(live, stepped, opened.broadcast, results, ledger, now, now - live.simulated_seconds)


def weighted_partials(live: LiveState, opened: OpenStep, results: Sequence[ChunkResult]) -> list[Arrays]:
    """Return the partial sums of all chunks, scaled down by their staleness."""
    algorithm = live.run.algorithm
    partials: list[Arrays] = []
    chunks = [chunk for call in opened.calls for chunk in call.chunks]
    for chunk, result in zip(chunks, results, strict=True):
        if result.dropped:
            continue
        staleness = live.round_index + 1 - chunk.round_index
        factor = (1.0 + staleness) ** -_schedule(live.run).staleness_exponent
        partial = algorithm.weighted_by_staleness(result.partial, factor) if staleness else result.partial
        assert partial is not None, "Run.check() has seen to it"
        partials.append(partial)
    return partials


def account_arrived(live: LiveState, arrived: InFlight, results: Sequence[ChunkResult]) -> RoundLedger:
    """Return what each client of the step received, computed and sent, in ascending order of clients."""
    arrived = arrived.take(np.argsort(arrived.client))
    return RoundLedger(
        **vars(ClientLedger.merged([result.ledger for result in results])),
        downlink_bits=arrived.downlink_bits,
        seconds=arrived.seconds,
        late=dropped_clients(results, arrived.client),
        staleness=live.round_index - arrived.version,
    )
