"""The pool of hosts that trains the chunks of a round, whoever dies meanwhile."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from narrowcast.cluster.failure import Failure, FailurePolicy
from narrowcast.cluster.hosts import Host, Hosts
from narrowcast.cluster.placement import deal
from narrowcast.platform.errors import RunFailed
from narrowcast.platform.types import Arrays, Chunk, ChunkResult

_BYTES_IN_A_CALL = 64 * 1024


@dataclass(frozen=True)
class _Call:
    host: Host
    chunks: list[Chunk]
    deadline: float


class RayExecutor:
    """Trains the chunks of each round, one call per host; the chunks of hosts that fail start over on others.

    Since a chunk's result depends only on the chunk, so does the run's. `settled_round` is the last round that is
    written down already; `incidents` says what failed since it was last emptied. Once `stopping` is set, training ends
    in a `KeyboardInterrupt`.
    """

    def __init__(self, hosts: Hosts, policy: FailurePolicy, stopping: threading.Event) -> None:
        self._hosts = hosts
        self._policy = policy
        self._stopping = stopping
        self.settled_round = 0
        self.incidents: list[str] = []

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """Train all chunks of a round and return their results in the order of the chunks."""
        if not chunks:
            return []
        self._hosts.look()
        results: dict[int, ChunkResult] = {}
        ready = self._hosts.ready() or self._hosts.wait()
        self._heed_stop()
        calls = self._give(_shared(broadcast), chunks, ready)
        if not self._collect_all(list(calls), results):
            self._collect_each(broadcast, calls, results)
        self.incidents += self._hosts.problems
        self._hosts.problems.clear()
        return [results[chunk.index] for chunk in chunks]

    def _heed_stop(self) -> None:
        if self._stopping.is_set():
            raise KeyboardInterrupt

    def _give(self, shared: Any, chunks: Sequence[Chunk], hosts: Sequence[Host]) -> dict[ray.ObjectRef[Any], _Call]:
        deadline = time.monotonic() + self._policy.round_timeout_seconds
        return {
            host.actor.train.remote(shared, part): _Call(host, part, deadline)
            for host, part in zip(hosts, deal(chunks, len(hosts)), strict=True)
            if part
        }

    def _collect_all(self, calls: list[ray.ObjectRef[Any]], results: dict[int, ChunkResult]) -> bool:
        """Keep the results of all calls at once, milliseconds sooner than one by one; whether nothing went wrong."""
        try:
            for part in ray.get(calls, timeout=self._policy.round_timeout_seconds):
                results |= {result.index: result for result in part}
        except RayError:
            return False
        return True

    def _collect_each(
        self, broadcast: Arrays, calls: dict[ray.ObjectRef[Any], _Call], results: dict[int, ChunkResult]
    ) -> None:
        """Keep the results of the calls as they come, and do again, or drop, what fails."""
        attempts: Counter[int] = Counter()
        nodes: set[str] = set()
        while calls:
            until = min(call.deadline for call in calls.values())
            answered, _ = ray.wait(list(calls), timeout=max(0.0, until - time.monotonic()))
            reference = answered[0] if answered else min(calls, key=lambda each: calls[each].deadline)
            self._heed_stop()
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
                    # A lost broadcast may be what failed.
                    calls |= self._give(_shared(broadcast), call.chunks, self._elsewhere(nodes, calls))
                else:
                    results |= {chunk.index: ChunkResult.of_dropped(chunk) for chunk in call.chunks}

    def _is_redone(self, call: _Call, problem: str, attempts: int) -> bool:
        """Give the host up and start another; whether its chunks are to be trained again."""
        round_index = call.chunks[0].round_index
        failure = Failure(round_index, call.host.node, problem, attempts, round_index <= self.settled_round)
        reaction, self._policy = self._policy.decide(failure)
        clients = sum(len(chunk.clients) for chunk in call.chunks)
        consequence = "start over" if reaction == "redo" else "count as stragglers"
        self.incidents.append(
            f"round {round_index}: a host on node {call.host.node[:8]}: {problem}; its {clients} clients {consequence}"
        )
        self._hosts.give_up(call.host)
        self._hosts.refill()
        return reaction == "redo"

    def _elsewhere(self, nodes: set[str], calls: dict[ray.ObjectRef[Any], _Call]) -> list[Host]:
        """The least busy hosts, on nodes that did not fail in this round if there are any."""
        ready = self._hosts.ready() or self._hosts.wait()
        ready = [host for host in ready if host.node not in nodes] or ready
        load = Counter(id(call.host) for call in calls.values())
        least = min(load[id(host)] for host in ready)
        return [host for host in ready if load[id(host)] == least]

    @staticmethod
    def _collect(call: ray.ObjectRef[Any], results: dict[int, ChunkResult]) -> str:
        """Keep the results of a call; what went wrong, or nothing."""
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
    """What all hosts read: one object in the store, or, where it is small, a copy in each call, which is quicker."""
    size = sum(values.nbytes for values in broadcast.values())
    return dict(broadcast) if size <= _BYTES_IN_A_CALL else ray.put(dict(broadcast))
