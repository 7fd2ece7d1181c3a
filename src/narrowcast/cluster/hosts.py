"""The client hosts of a run, started, moved and stopped as nodes join, leave and fail, and the service of its keys.

Hosts ask the key service for their clients' secrets, and the driver asks it to open a sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from narrowcast.cluster.decisions import Node, Policy, place
from narrowcast.platform.compiled import one_thread
from narrowcast.platform.contracts import SecureSums
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.rounds.chunks import train_chunks
from narrowcast.platform.rounds.client_contracts import ClientSplit
from narrowcast.platform.rounds.evaluation import measure_chunk
from narrowcast.platform.rounds.ledger import ChunkResult, ClientMeasures
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.storage.host import host_clock
from narrowcast.platform.types import Arrays, Chunk, PayloadError


@ray.remote(num_cpus=0)
class KeyService:
    """Holds the key store of a run in its own process, and dies with the driver that started it."""

    def __init__(self, secure: SecureSums, answered: Path | None) -> None:
        self._key_store = secure.key_store(answered)

    def call(self, method: str, round_index: int, arrays: Arrays) -> Arrays:
        """Return the key store's answer."""
        return self._key_store.call(method, round_index, arrays)


def start_key_service(secure: SecureSums, answered: Path | None) -> Any:
    """Start the key service on this node, which has the run's folder and the key files of a run with offline keys."""
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return KeyService.options(scheduling_strategy=this_node).remote(secure, answered)  # type: ignore[attr-defined]


class RemoteKeyStore:
    """The key store of a key service, for its driver and hosts."""

    def __init__(self, service: Any) -> None:
        self._service = service

    def call(self, method: str, round_index: int, arrays: Arrays) -> Arrays:
        """Return the key store's answer; raise the error that it raised, `RunFailed` if its actor is gone."""
        try:
            answer: Arrays = ray.get(self._service.call.remote(method, round_index, arrays))
        except RayTaskError as error:
            cause = error.cause
            raise (
                cause if isinstance(cause, PayloadError | UserError) else RunFailed(f"key service: {cause!r}")
            ) from error
        except RayActorError as error:
            raise RunFailed("the actor that holds the clients' keys is gone; resume the run") from error
        return answer


@ray.remote
class ClientHost:
    """The actor that trains chunks of clients.

    The clients' data and profiles are in the object store, and their state comes with each call. A host keeps nothing
    between rounds, so that a killed one is replaced without losing the state of its clients.
    """

    def __init__(self, run: Run, key_store: Any) -> None:
        self._run = run
        self._key_store = None if key_store is None else RemoteKeyStore(key_store)

    def ready(self) -> bool:
        """Return True once the host can train."""
        return True

    def train(self, broadcast: Arrays, chunks: list[Chunk]) -> list[ChunkResult]:
        """Train some of a round's chunks, one after the other."""
        with one_thread():
            return train_chunks(self._run, broadcast, chunks, self._key_store)

    def measure(self, broadcast: Arrays, chunks: list[Chunk], splits: list[ClientSplit]) -> list[ClientMeasures]:
        """Measure the clients of some chunks, one chunk after the other."""
        with one_thread():
            return [measure_chunk(self._run, broadcast, chunk, splits) for chunk in chunks]


_CHECK_SECONDS = 1.0  # between checks of the nodes, which take a fraction of a millisecond each
_BLOCKED_SECONDS = 10.0  # a node on which a host failed may be dying, before the cluster notices
_RAY_RESOURCES = ("node:", "memory", "object_store_memory")


def alive_nodes() -> list[Node]:
    """Return the nodes that the cluster reports as alive, with the resources that hosts can request there."""
    return [
        Node(
            node["NodeID"],
            {kind: amount for kind, amount in node["Resources"].items() if not kind.startswith(_RAY_RESOURCES)},
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


@dataclass(frozen=True)
class PlacementRequest:
    """The hosts that a run requests: number, needs of each, placement policy, and time to wait for a first one."""

    hosts: int
    need: Mapping[str, float]
    policy: Policy
    timeout_seconds: float

    def options(self, node: str) -> dict[str, Any]:
        """Return the options of Ray for a host on this node."""
        custom = {kind: amount for kind, amount in self.need.items() if kind not in ("CPU", "GPU")}
        return {
            "num_cpus": self.need.get("CPU", 0),
            "num_gpus": self.need.get("GPU", 0),
            "resources": custom,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }


@dataclass(eq=False)
class Host:
    """A client host on a node; `starting` is its pending first answer, None once it can train."""

    actor: Any
    node: str
    started_at: float
    starting: ray.ObjectRef[Any] | None


class Hosts:
    """The hosts of a run: as many as requested, or as many as fit on the nodes at the time."""

    def __init__(self, request: PlacementRequest, run: ray.ObjectRef[Any], key_store: Any = None) -> None:
        self._request = request
        self._arguments = (run, key_store)
        self._hosts: list[Host] = []
        self._checked_at = -_CHECK_SECONDS
        self._blocked: dict[str, float] = {}
        self.problems: list[str] = []

    def starting(self) -> list[ray.ObjectRef[Any]]:
        """Return the pending answers of hosts that are still starting."""
        return [host.starting for host in self._hosts if host.starting is not None]

    def ready(self) -> list[Host]:
        """Return the hosts that can train now."""
        if pending := self.starting():
            answered, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
            for reference in answered:
                host = next(host for host in self._hosts if host.starting == reference)
                try:
                    ray.get(reference)
                except (RayActorError, ActorUnschedulableError) as error:  # the second if its node has just left
                    self.fail(host, f"it did not start ({type(error).__name__})")
                except RayTaskError as error:
                    raise RunFailed(f"a client host could not start: {error.cause!r}") from error
                else:
                    host.starting = None
        return [host for host in self._hosts if host.starting is None]

    def wait(self, seconds_for_all: float = 0.0) -> list[Host]:
        """Return the hosts that can train: all, or after `seconds_for_all` at least one.

        Raise `RunFailed` if none can within the timeout of the request.
        """
        began = host_clock().monotonic()
        while True:
            self.refill()
            ready, waited = self.ready(), host_clock().monotonic() - began
            if ready and (waited >= seconds_for_all or not self.starting()):
                return ready
            if waited >= self._request.timeout_seconds:
                last = f" (last: {self.problems[-1]})" if self.problems else ""
                raise RunFailed(
                    f"no client host could start within {self._request.timeout_seconds:g} s: no node has room for "
                    f"{self._need_in_words()}, or others use it{last}; add nodes, or wait for them, then resume"
                )
            if pending := self.starting():
                ray.wait(pending, num_returns=len(pending), timeout=_CHECK_SECONDS / 2)
            else:
                host_clock().sleep(_CHECK_SECONDS / 2)

    def _need_in_words(self) -> str:
        return " and ".join(f"{amount:g} {kind}" for kind, amount in self._request.need.items() if amount) or "a host"

    def check(self) -> None:
        """Between rounds, account for nodes that joined or left, and move hosts as the placement policy requires."""
        if host_clock().monotonic() - self._checked_at < _CHECK_SECONDS:
            return
        target = self.refill()
        if not self.starting():  # a host that moves stays until its replacement can train
            for name, count in target.items():
                for host in [host for host in self._hosts if host.node == name][count:]:
                    self._stop(host)

    def refill(self) -> dict[str, int]:
        """Start hosts where they fit; return how many each node should have."""
        at = self._checked_at = host_clock().monotonic()
        nodes = {node.name: node for node in alive_nodes()}
        for host in [host for host in self._hosts if host.node not in nodes]:
            self.fail(host, f"its node {host.node[:8]} left")
        for host in [
            host for host in self._hosts if host.starting and at - host.started_at > self._request.timeout_seconds
        ]:
            self.fail(host, f"node {host.node[:8]} has no room now")
        present = Counter(host.node for host in self._hosts)
        target = place(self._capacity(nodes, present, at), self._request.hosts, self._request.policy, present)
        for name, count in target.items():
            for _ in range(count - present[name]):
                self._start(name)
        return target

    def _capacity(self, nodes: Mapping[str, Node], present: Mapping[str, int], at: float) -> dict[str, int]:
        self._blocked = {name: until for name, until in self._blocked.items() if until > at}
        capacity = {name: node.room_for(self._request.need, self._request.hosts) for name, node in nodes.items()}
        if self._blocked.keys() >= capacity.keys():
            return capacity
        return {name: min(most, present[name]) if name in self._blocked else most for name, most in capacity.items()}

    def _start(self, node: str) -> None:
        actor = ClientHost.options(**self._request.options(node)).remote(*self._arguments)  # type: ignore[attr-defined]
        self._hosts.append(Host(actor, node, host_clock().monotonic(), actor.ready.remote()))

    def kill(self) -> None:
        """Kill all hosts, also from another thread while calls to them are pending."""
        for host in list(self._hosts):
            ray.kill(host.actor)

    def _stop(self, host: Host) -> None:
        ray.kill(host.actor)
        self._hosts.remove(host)

    def fail(self, host: Host, problem: str) -> None:
        """Stop a host that failed between calls, and record the problem."""
        self.problems.append(f"a host was stopped: {problem}")
        self.drop(host)

    def drop(self, host: Host) -> None:
        """Stop a host, if it is still there, and place no host on its node for a while."""
        self._blocked[host.node] = host_clock().monotonic() + _BLOCKED_SECONDS
        if host in self._hosts:
            self._stop(host)
