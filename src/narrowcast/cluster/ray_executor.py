"""The executor on Ray: trains the chunks of a round on client hosts, and handles hosts that fail."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from narrowcast.cluster.failure import Failure, FailurePolicy
from narrowcast.cluster.hosts import Host, Hosts
from narrowcast.cluster.placement import deal
from narrowcast.platform.client_contracts import ClientSplit
from narrowcast.platform.client_metrics import measure_chunk
from narrowcast.platform.errors import RunFailed
from narrowcast.platform.host_time import host_time
from narrowcast.platform.run import Run
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, ClientMeasures

_BYTES_IN_A_CALL = 64 * 1024


@dataclass(frozen=True)
class _Call:
    host: Host
    chunks: list[Chunk]
    deadline: float


class RayExecutor:
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
            measured |= {each.index: each for each in results}
        return [measured[chunk.index] for chunk in chunks]

    def _answer(self, call: ray.ObjectRef[Any] | None) -> list[ClientMeasures] | None:
        """Return the result of a call; None if there was no call, or its host failed."""
        try:
            found: list[ClientMeasures] = ray.get(call, timeout=self._policy.round_timeout_seconds) if call else []
        except RayError:
            return None
        return found

    def _raise_if_stopping(self) -> None:
        if self._stopping.is_set():
            raise KeyboardInterrupt

    def _send(self, shared: Any, chunks: Sequence[Chunk], hosts: Sequence[Host]) -> dict[ray.ObjectRef[Any], _Call]:
        deadline = host_time().monotonic() + self._policy.round_timeout_seconds
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
            answered, _ = ray.wait(list(calls), timeout=max(0.0, until - host_time().monotonic()))
            reference = answered[0] if answered else min(calls, key=lambda each: calls[each].deadline)
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
