"""The hosts of a run on the nodes that there are: started, found ready, moved and given up as nodes come and go."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from narrowcast.cluster.client_host import ClientHost
from narrowcast.cluster.placement import Node, Policy, place
from narrowcast.platform.errors import RunFailed

_LOOK_SECONDS = 1.0  # between looks at the nodes, which cost a fraction of a millisecond each
_SHUNNED_SECONDS = 10.0  # a node on which a host failed may be dying, unknown to the cluster until it misses its checks
_KINDS_OF_RAY = ("node:", "memory", "object_store_memory")


def alive_nodes() -> list[Node]:
    """The nodes that the cluster takes to be alive, and the resources that hosts can ask for there."""
    return [
        Node(
            node["NodeID"],
            {kind: there for kind, there in node["Resources"].items() if not kind.startswith(_KINDS_OF_RAY)},
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


@dataclass(frozen=True)
class Wish:
    """The hosts that a run would like: how many, what each needs, and how they go to the nodes."""

    hosts: int
    need: Mapping[str, float]
    policy: Policy
    patience_seconds: float

    def options(self, node: str) -> dict[str, Any]:
        """What Ray is to be asked for, for a host on this node."""
        custom = {kind: each for kind, each in self.need.items() if kind not in ("CPU", "GPU")}
        return {
            "num_cpus": self.need.get("CPU", 0),
            "num_gpus": self.need.get("GPU", 0),
            "resources": custom,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }


@dataclass(eq=False)
class Host:
    """A client host on a node; `starting` is what it answers once it can train, None from then on."""

    actor: Any
    node: str
    started_at: float
    starting: ray.ObjectRef[Any] | None


class Hosts:
    """As many hosts as a run would like, or as the nodes of the moment have room for."""

    def __init__(self, wish: Wish, run: ray.ObjectRef[Any], key_store: Any = None) -> None:
        self._wish = wish
        self._arguments = (run, key_store)
        self._hosts: list[Host] = []
        self._looked_at = -_LOOK_SECONDS
        self._shunned: dict[str, float] = {}
        self.problems: list[str] = []

    def starting(self) -> list[ray.ObjectRef[Any]]:
        """What the hosts that cannot train yet will answer."""
        return [host.starting for host in self._hosts if host.starting is not None]

    def ready(self) -> list[Host]:
        """The hosts that can train now."""
        if pending := self.starting():
            answered, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
            for reference in answered:
                host = next(host for host in self._hosts if host.starting == reference)
                try:
                    ray.get(reference)
                except RayActorError as error:
                    self.fail(host, f"it did not start ({type(error).__name__})")
                except RayTaskError as error:
                    raise RunFailed(f"a client host could not start: {error.cause!r}") from error
                else:
                    host.starting = None
        return [host for host in self._hosts if host.starting is None]

    def wait(self, seconds_for_all: float = 0.0) -> list[Host]:
        """The hosts that can train: all, or after so long at least one; `RunFailed` beyond the run's patience."""
        began = time.monotonic()
        while True:
            self.refill()
            ready, waited = self.ready(), time.monotonic() - began
            if ready and (waited >= seconds_for_all or not self.starting()):
                return ready
            if waited >= self._wish.patience_seconds:
                last = f" (last: {self.problems[-1]})" if self.problems else ""
                raise RunFailed(
                    f"no client host could start within {self._wish.patience_seconds:g} s: no node has room for "
                    f"{self._said_need()}, or others use it{last}; add nodes, or wait for them, then resume"
                )
            if pending := self.starting():
                ray.wait(pending, num_returns=len(pending), timeout=_LOOK_SECONDS / 2)
            else:
                time.sleep(_LOOK_SECONDS / 2)

    def _said_need(self) -> str:
        return " and ".join(f"{each:g} {kind}" for kind, each in self._wish.need.items() if each) or "a host"

    def look(self) -> None:
        """Between rounds: take note of nodes that came and went, and move hosts where that spreads or packs them."""
        if time.monotonic() - self._looked_at < _LOOK_SECONDS:
            return
        target = self.refill()
        if not self.starting():  # who moves stays until its successor can train
            for name, count in target.items():
                for host in [host for host in self._hosts if host.node == name][count:]:
                    self._stop(host)

    def refill(self) -> dict[str, int]:
        """Start hosts where there is room for them; how many each node should have."""
        at = self._looked_at = time.monotonic()
        nodes = {node.name: node for node in alive_nodes()}
        for host in [host for host in self._hosts if host.node not in nodes]:
            self.fail(host, f"its node {host.node[:8]} left")
        for host in [
            each for each in self._hosts if each.starting and at - each.started_at > self._wish.patience_seconds
        ]:
            self.fail(host, f"node {host.node[:8]} has no room at present")
        present = Counter(host.node for host in self._hosts)
        target = place(self._room(nodes, present, at), self._wish.hosts, self._wish.policy, present)
        for name, count in target.items():
            for _ in range(count - present[name]):
                self._start(name)
        return target

    def _room(self, nodes: Mapping[str, Node], present: Mapping[str, int], at: float) -> dict[str, int]:
        self._shunned = {name: until for name, until in self._shunned.items() if until > at}
        room = {name: node.room_for(self._wish.need, self._wish.hosts) for name, node in nodes.items()}
        if self._shunned.keys() >= room.keys():
            return room
        return {name: min(most, present[name]) if name in self._shunned else most for name, most in room.items()}

    def _start(self, node: str) -> None:
        actor = ClientHost.options(**self._wish.options(node)).remote(*self._arguments)  # type: ignore[attr-defined]
        self._hosts.append(Host(actor, node, time.monotonic(), actor.ready.remote()))

    def kill(self) -> None:
        """End all hosts there are, whoever waits for them, from a thread of its own."""
        for host in list(self._hosts):
            ray.kill(host.actor)

    def _stop(self, host: Host) -> None:
        ray.kill(host.actor)
        self._hosts.remove(host)

    def fail(self, host: Host, problem: str) -> None:
        """Give a host up between or before its calls, and say so."""
        self.problems.append(f"a host is given up: {problem}")
        self.give_up(host)

    def give_up(self, host: Host) -> None:
        """Let a host go, if it is not gone yet, and leave its node alone for a while."""
        self._shunned[host.node] = time.monotonic() + _SHUNNED_SECONDS
        if host in self._hosts:
            self._stop(host)
