"""A run on Ray: the executor that trains chunks on client hosts, the driver actor that runs the rounds, and metrics.

The driver runs next to the client hosts and streams the outcomes of the rounds. The executor handles hosts that fail.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import metrics as ray_metrics

from narrowcast.cluster.decisions import Failure, FailurePolicy, deal
from narrowcast.cluster.hosts import Host, Hosts, PlacementRequest, RemoteKeyStore, start_key_service
from narrowcast.platform.contracts import Executor
from narrowcast.platform.errors import RunFailed
from narrowcast.platform.rounds.client_contracts import ClientSplit, check_answered
from narrowcast.platform.rounds.evaluation import measure_chunk
from narrowcast.platform.rounds.ledger import ChunkResult, ClientMeasures
from narrowcast.platform.rounds.loop import rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import Interrupted, Run, RunState
from narrowcast.platform.storage.host import host_clock
from narrowcast.platform.types import Arrays, Chunk

_BYTES_IN_A_CALL = 64 * 1024


@dataclass(frozen=True)
class _Call:
    host: Host
    chunks: list[Chunk]
    deadline: float


class RayExecutor(Executor):
    """Trains the chunks of each round with one call per host; chunks of a failed host are trained again on others.

    The result of a chunk depends on the chunk only, so results do not depend on failures. `settled_round` is the last
    round that is recorded already; `incidents` lists the failures since it was last emptied. Once `stopping` is set,
    training ends with a `KeyboardInterrupt`.
    """

    def __init__(self, run: Run, hosts: Hosts, policy: FailurePolicy, stopping: threading.Event) -> None:
        self._run = run
        self._hosts = hosts
        self._policy = policy
        self._stopping = stopping
        self.settled_round = 0
        self.incidents: list[str] = []

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """Train all chunks of a round and return their results in the order of the chunks."""
        if not chunks:
            return []
        self._hosts.check()
        results: dict[int, ChunkResult] = {}
        ready = self._hosts.ready() or self._hosts.wait()
        self._raise_if_stopping()
        calls = self._send(_shared(broadcast), chunks, ready)
        if not self._collect_all(list(calls), results):
            self._collect_each(broadcast, calls, results)
        self.incidents += self._hosts.problems
        self._hosts.problems.clear()
        return [results[chunk.index] for chunk in chunks]

    def measure(
        self, broadcast: Arrays, chunks: Sequence[Chunk], splits: Sequence[ClientSplit]
    ) -> list[ClientMeasures]:
        """Measure the clients of all chunks and return the results in the order of the chunks.

        Those of a host that fails, or is stopped, are measured in this process, so that a round that the server has
        finished is recorded in any case.
        """
        shared, hosts = _shared(broadcast), self._hosts.ready()
        parts = [part for part in deal(chunks, max(len(hosts), 1)) if part]
        calls = [host.actor.measure.remote(shared, part, splits) for host, part in zip(hosts, parts, strict=False)]
        measured: dict[int, ClientMeasures] = {}
        for call, part in zip_longest(calls, parts):  # without hosts there are no calls
            results = self._answer(call) or [measure_chunk(self._run, broadcast, chunk, splits) for chunk in part]
            measured |= {result.index: result for result in results}
        return [measured[chunk.index] for chunk in chunks]

    def _answer(self, call: ray.ObjectRef[Any] | None) -> list[ClientMeasures] | None:
        """Return the result of a call; None if there was no call, or its host failed."""
        try:
            measures: list[ClientMeasures] = ray.get(call, timeout=self._policy.round_timeout_seconds) if call else []
        except RayError:
            return None
        return measures

    def _raise_if_stopping(self) -> None:
        if self._stopping.is_set():
            raise KeyboardInterrupt

    def _send(self, shared: Any, chunks: Sequence[Chunk], hosts: Sequence[Host]) -> dict[ray.ObjectRef[Any], _Call]:
        deadline = host_clock().monotonic() + self._policy.round_timeout_seconds
        return {
            host.actor.train.remote(shared, part): _Call(host, part, deadline)
            for host, part in zip(hosts, deal(chunks, len(hosts)), strict=True)
            if part
        }

    def _collect_all(self, calls: list[ray.ObjectRef[Any]], results: dict[int, ChunkResult]) -> bool:
        """Add the results of all calls at once, milliseconds faster than one by one; return False if any failed."""
        try:
            for part in ray.get(calls, timeout=self._policy.round_timeout_seconds):
                results |= {result.index: result for result in part}
        except RayError:
            return False
        return True

    def _collect_each(
        self, broadcast: Arrays, calls: dict[ray.ObjectRef[Any], _Call], results: dict[int, ChunkResult]
    ) -> None:
        """Add the results of calls as they arrive, and redo or drop the chunks of those that fail."""
        attempts: Counter[int] = Counter()
        nodes: set[str] = set()
        while calls:
            until = min(call.deadline for call in calls.values())
            answered, _ = ray.wait(list(calls), timeout=max(0.0, until - host_clock().monotonic()))
            reference = answered[0] if answered else min(calls, key=lambda call: calls[call].deadline)
            self._raise_if_stopping()
            call = calls.pop(reference)
            problem = (
                self._collect(reference, results)
                if answered
                else f"no answer within {self._policy.round_timeout_seconds:g} s"
            )
            if problem:
                nodes.add(call.host.node)
                attempts.update(chunk.index for chunk in call.chunks)
                if self._is_redone(call, problem, max(attempts[chunk.index] for chunk in call.chunks)):
                    # The failure may be the loss of the broadcast.
                    calls |= self._send(_shared(broadcast), call.chunks, self._elsewhere(nodes, calls))
                else:
                    results |= {chunk.index: ChunkResult.of_dropped(chunk) for chunk in call.chunks}

    def _is_redone(self, call: _Call, problem: str, attempts: int) -> bool:
        """Replace the host of a failed call; return whether its chunks are to be trained again."""
        round_index = call.chunks[0].round_index
        failure = Failure(round_index, call.host.node, problem, attempts, round_index <= self.settled_round)
        reaction, self._policy = self._policy.decide(failure)
        clients = sum(len(chunk.clients) for chunk in call.chunks)
        consequence = "are trained again" if reaction == "redo" else "count as stragglers"
        self.incidents.append(
            f"round {round_index}: a host on node {call.host.node[:8]}: {problem}; its {clients} clients {consequence}"
        )
        self._hosts.drop(call.host)
        self._hosts.refill()
        return reaction == "redo"

    def _elsewhere(self, nodes: set[str], calls: dict[ray.ObjectRef[Any], _Call]) -> list[Host]:
        """Return the least busy hosts, if possible on nodes without a failure in this round."""
        ready = self._hosts.ready() or self._hosts.wait()
        ready = [host for host in ready if host.node not in nodes] or ready
        load = Counter(id(call.host) for call in calls.values())
        least = min(load[id(host)] for host in ready)
        return [host for host in ready if load[id(host)] == least]

    @staticmethod
    def _collect(call: ray.ObjectRef[Any], results: dict[int, ChunkResult]) -> str:
        """Add the results of a call; return its problem, or an empty string."""
        try:
            results |= {result.index: result for result in ray.get(call)}
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RayError):
                return type(cause).__name__
            raise (cause if isinstance(cause, RunFailed) else RunFailed(f"a client host failed: {cause!r}")) from error
        except RayError as error:
            return type(error).__name__
        return ""


def _shared(broadcast: Arrays) -> Any:
    """Return the broadcast as one object in the store, or as a copy per call if it is small, which is faster."""
    size = sum(values.nbytes for values in broadcast.values())
    return dict(broadcast) if size <= _BYTES_IN_A_CALL else ray.put(dict(broadcast))


_RUN = ("run",)


class RunMetrics:
    """The gauges and counters of a run, each labelled with its name, as Prometheus scrapes them from Ray.

    They are the duration of rounds, the throughput and the queued chunks.
    """

    def __init__(self, run: str) -> None:
        self._labels = {"run": run}
        self._round = ray_metrics.Gauge("narrowcast_round", "completed rounds", _RUN)
        self._round_seconds = ray_metrics.Gauge("narrowcast_round_seconds", "wall time of the last round", _RUN)
        self._part_seconds = ray_metrics.Gauge(
            "narrowcast_round_part_seconds", "wall time of its parts", (*_RUN, "part")
        )
        self._clients = ray_metrics.Gauge(
            "narrowcast_clients_per_second", "clients trained per second in the last round", _RUN
        )
        self._bits = ray_metrics.Gauge(
            "narrowcast_uplink_bits_per_second", "uplink bits produced per second in the last round", _RUN
        )
        self._total_clients = ray_metrics.Counter("narrowcast_clients", "participations", _RUN)
        self._total_bits = ray_metrics.Counter("narrowcast_uplink_bits", "uplink of all clients", _RUN)
        self._queue = ray_metrics.Gauge("narrowcast_queued_chunks", "chunks waiting for or at the client hosts", _RUN)

    def queued(self, chunks: int) -> None:
        """Set the number of chunks that are not trained yet."""
        self._queue.set(chunks, self._labels)

    def record(self, outcome: Outcome) -> None:
        """Update the metrics with a finished round."""
        row, seconds = outcome.record, max(outcome.wall_seconds, 1e-9)
        self._round.set(row.round, self._labels)
        self._round_seconds.set(outcome.wall_seconds, self._labels)
        for part, its_seconds in vars(outcome.timing).items():
            self._part_seconds.set(its_seconds, {**self._labels, "part": part})
        self._clients.set(row.clients / seconds, self._labels)
        self._bits.set(row.uplink_bits / seconds, self._labels)
        if row.clients:  # Ray's counters refuse a zero
            self._total_clients.inc(row.clients, self._labels)
        if row.uplink_bits:
            self._total_bits.inc(row.uplink_bits, self._labels)


@dataclass(frozen=True)
class Metered(Executor):
    """An executor that reports its queue to the metrics."""

    executor: RayExecutor
    metrics: RunMetrics

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """Train the chunks on the wrapped executor."""
        self.metrics.queued(len(chunks))
        results = self.executor.train(broadcast, chunks)
        self.metrics.queued(0)
        return results

    def measure(
        self, broadcast: Arrays, chunks: Sequence[Chunk], splits: Sequence[ClientSplit]
    ) -> list[ClientMeasures]:
        """Measure the clients on the wrapped executor."""
        return self.executor.measure(broadcast, chunks, splits)


_BATCH_SECONDS = 0.1  # sending a batch of rounds takes the driver milliseconds in which its hosts wait
_START_SECONDS = 20.0  # for all hosts to start; then round 1 begins with those that are ready


@dataclass
class Batch:
    """Consecutive rounds with the failures during them; `stopped` is the last state if the driver was asked to stop."""

    outcomes: list[Outcome] = field(default_factory=list)
    incidents: list[str] = field(default_factory=list)
    stopped: RunState | None = None


@ray.remote(num_cpus=0, concurrency_groups={"stop": 1})  # type: ignore[call-overload]
class Driver:
    """The actor that runs the rounds and owns the client hosts of a run; dies with the process that started it."""

    def __init__(self, shared: list[ray.ObjectRef[Any]], request: PlacementRequest, policy: FailurePolicy) -> None:
        # A reference inside a list arrives as a reference, so that the hosts read the same object.
        (run,) = shared
        self._run: Run = ray.get(run)
        self._secure = self._run.algorithm.secure_sums
        self._key_service = None if self._secure is None else start_key_service(self._secure, self._run.answered)
        self._hosts = Hosts(request, run, self._key_service)
        self._policy = policy
        self._stopping = threading.Event()

    @ray.method(concurrency_group="stop")
    def stop(self) -> None:
        """Abandon the round in progress; `run` then yields the state after the last finished round and ends."""
        self._stopping.set()
        self._hosts.kill()

    def run(self, state: RunState) -> Generator[Batch, None, None]:
        """Run the rounds after `state` and yield them a few at a time with the failures during them."""
        self._hosts.wait(_START_SECONDS)
        pool = RayExecutor(self._run, self._hosts, self._policy, self._stopping)
        batch, sent_at = Batch(), host_clock().monotonic()
        metrics = RunMetrics(self._run.plan.name)
        executor: Executor = Metered(pool, metrics)
        secure = self._secure and self._secure.rounds(RemoteKeyStore(self._key_service), self._run.task)
        pool.settled_round = state.settled_round
        if secure is not None:
            check_answered(secure, self._run.answered, state.settled_round)
            pool.settled_round = max(state.settled_round, secure.answered_round)
        try:
            for outcome in rounds(self._run, executor, state, secure):
                metrics.record(outcome)
                batch.outcomes.append(outcome)
                if outcome.state is not None or host_clock().monotonic() - sent_at > _BATCH_SECONDS:
                    batch.incidents, pool.incidents = pool.incidents, []
                    yield batch
                    batch, sent_at = Batch(), host_clock().monotonic()
        except Interrupted as stop:
            (stopped,) = stop.states
            assert isinstance(stopped, RunState), "these are rounds"
            batch.stopped = stopped
        batch.incidents = pool.incidents
        yield batch
