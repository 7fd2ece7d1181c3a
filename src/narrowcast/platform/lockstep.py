"""Several runs of one experiment in lockstep, their local training as one program where shapes allow.

Replicas differ in their seeds, learning rates or ranks. What a run costs beside its clients' arithmetic, the calls of a
tensor program, is then paid once for all of them, and a replica's results are those it has alone.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, replace

from narrowcast.platform.chunk_training import naming_chunk_size
from narrowcast.platform.contracts import Algorithm, LocalCall, Task, TrainsThenUploads
from narrowcast.platform.errors import RunFailed
from narrowcast.platform.plan import Plan
from narrowcast.platform.rounds import Outcome, close_round, open_round, rotation
from narrowcast.platform.simulation.stragglers import OpenRound, chunks_with_late, renewed
from narrowcast.platform.state import LiveState, RunState, stoppable
from narrowcast.platform.threads import one_thread
from narrowcast.platform.types import ChunkResult


@dataclass(frozen=True)
class Replica:
    """One of the runs; all replicas have the same data."""

    plan: Plan
    algorithm: Algorithm
    task: Task
    state: RunState


def run_lockstep(
    replicas: Sequence[Replica],
) -> Generator[dict[int, Outcome | RunFailed], Collection[int] | None, None]:
    """Play a round of every replica that has one left; what came of it by the replica's place.

    A replica that fails is not played on; the others are, less those whose places are sent back as ended early.
    `wall_seconds` is an equal share of the time for all. Stopped in a round, it raises `Interrupted`.
    """
    progress = [LiveState.of(each.state, each.algorithm, each.task) for each in replicas]
    orders = [rotation(each.plan, each.task.data.n_clients) for each in replicas]
    playing = [place for place, each in enumerate(replicas) if each.state.round_index < each.plan.rounds]
    while playing:
        began = time.perf_counter()
        outcomes: dict[int, Outcome | RunFailed] = {}
        with one_thread():
            opened = [
                open_round(each.plan, each.algorithm, each.task, progress[place], orders[place])
                for place in playing
                for each in [replicas[place]]
            ]
            ready = time.perf_counter()
            with stoppable(*progress):
                results = train_in_time([replicas[place] for place in playing], opened)
            trained = time.perf_counter()
            for place, its_round, its_results in zip(playing, opened, results, strict=True):
                each = replicas[place]
                try:
                    outcomes[place] = close_round(
                        each.plan, each.algorithm, each.task, progress[place], its_round, its_results
                    )
                except RunFailed as error:
                    outcomes[place] = error
        moments = (began, ready, trained, time.perf_counter())
        timed = [result for its_results in results for result in its_results]
        ended = yield {
            place: outcome.timed(moments, timed, 1 / len(playing)) if isinstance(outcome, Outcome) else outcome
            for place, outcome in outcomes.items()
        }
        playing = [
            place
            for place in playing
            if isinstance(outcomes[place], Outcome)
            and place not in (ended or ())
            and progress[place].round_index < replicas[place].plan.rounds
        ]


def train_in_time(replicas: Sequence[Replica], opened: Sequence[OpenRound]) -> list[list[ChunkResult]]:
    """Train a round of every replica, and what turns out to have late clients a second time, without them."""
    results = train_together(replicas, opened)
    again = [
        replace(each, chunks=chunks_with_late(replica.plan, replica.task, each, its_results))
        for replica, each, its_results in zip(replicas, opened, results, strict=True)
    ]
    return [renewed(*both) for both in zip(results, train_together(replicas, again), strict=True)]


def train_together(replicas: Sequence[Replica], opened: Sequence[OpenRound]) -> list[list[ChunkResult]]:
    """Train a round of every replica: the first chunks of all as one program, then the second, and so on."""
    results: list[list[ChunkResult]] = [[] for _ in replicas]
    for index in range(max(len(each.chunks) for each in opened)):
        places = [place for place, each in enumerate(opened) if index < len(each.chunks)]
        calls = {place: _local_call(replicas[place], opened[place], index) for place in places}
        together = [place for place in places if calls[place] is not None]
        chunks = [opened[place].chunks[index] for place in places]
        with naming_chunk_size(chunks[0].round_index, sum(len(chunk.clients) for chunk in chunks)):
            if together:
                training = replicas[together[0]].task.training
                updates = training.train_together([calls[place] for place in together])
            for place in places:
                began = time.perf_counter()
                each, broadcast, chunk = replicas[place], opened[place].broadcast.arrays, opened[place].chunks[index]
                if place in together:
                    update = updates[together.index(place)]
                    result = each.algorithm.upload(broadcast, chunk, each.task, update)  # type: ignore[attr-defined]
                else:
                    result = each.algorithm.train(broadcast, chunk, each.task)
                results[place].append(replace(result, seconds=time.perf_counter() - began))
    return results


def _local_call(replica: Replica, opened: OpenRound, index: int) -> LocalCall | None:
    if not isinstance(replica.algorithm, TrainsThenUploads):
        return None
    return replica.algorithm.local_call(opened.broadcast.arrays, opened.chunks[index], replica.task)
