"""Decisions on a cluster as pure functions: what a failure means, and what runs where.

Decisions on failures of hosts, nodes and drivers, as pure functions; the caller acts on them.

Placement of hosts on nodes and of chunks on hosts, as pure functions; results depend on neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from narrowcast.platform.errors import RunFailed
from narrowcast.platform.types import Chunk

Reaction = Literal["redo", "drop"]
_HOSTS_PER_CHUNK = 5  # failures on one chunk in a round, after which the chunk itself is blamed


@dataclass(frozen=True)
class Failure:
    """A host that died or timed out, and the work that it had.

    `attempts`: hosts that failed in this round on the chunk with most failures. `settled`: the round was recorded
    before, and only runs again to rebuild its state.
    """

    round_index: int
    node: str
    problem: str
    attempts: int = 1
    settled: bool = False


@dataclass(frozen=True)
class FailurePolicy:
    """The reaction to failures, and how many a run tolerates; hosts lost with one node count once.

    `redo` trains the chunks of a failed host elsewhere: results stay the same, and the round takes longer. `drop`
    counts their clients as stragglers of the round: results change, and no time is lost. A settled round is always
    redone, since it must repeat its recorded result.
    """

    reaction: Reaction
    failures_left: int
    round_timeout_seconds: float
    last: tuple[int, str] | None = None

    def decide(self, failure: Failure) -> tuple[Reaction, FailurePolicy]:
        """Return the reaction and the policy after this failure; raise `RunFailed` if no failure was left."""
        policy = self
        if self.last != (failure.round_index, failure.node):
            policy = replace(self.spend(failure.problem), last=(failure.round_index, failure.node))
        reaction: Reaction = "redo" if failure.settled else self.reaction
        if reaction == "redo" and failure.attempts >= _HOSTS_PER_CHUNK:
            raise RunFailed(
                f"round {failure.round_index}: {failure.attempts} hosts failed on the same clients, last: "
                f"{failure.problem}; check the cluster's logs (memory?), then resume, perhaps with a lower chunk_size"
            )
        return reaction, policy

    def spend(self, problem: str) -> FailurePolicy:
        """Return the policy after one more failure; raise `RunFailed` if none was left."""
        if self.failures_left == 0:
            raise RunFailed(
                f"the cluster failed once too often, last: {problem}; check its logs, then resume, "
                "or raise backend.max_failures"
            )
        return replace(self, failures_left=self.failures_left - 1)


Policy = Literal["spread", "pack"]
_ROUNDING = 1e-6  # three hosts with a third of a GPU each fit on one


@dataclass(frozen=True)
class Node:
    """A node of the cluster and the resources that it offers, by name: CPU, GPU and custom ones."""

    name: str
    offers: Mapping[str, float]

    def room_for(self, need: Mapping[str, float], most: int) -> int:
        """Return how many hosts with this need fit on the node, at most `most`."""
        fits = [(self.offers.get(kind, 0.0) + _ROUNDING) // each for kind, each in need.items() if each > 0]
        return int(min([*fits, most]))


def place(
    room: Mapping[str, int], wanted: int, policy: Policy, present: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return how many of the wanted hosts each node gets; fewer in total if the nodes have no room for more.

    `room`: how many hosts fit on each node. `spread` gives the next host to the node with the fewest, `pack` fills the
    node with the most room first. Ties go to the node with more hosts `present`, so that a repeated placement moves
    no host.
    """
    present = present or {}
    placed = dict.fromkeys(room, 0)

    def rank(name: str) -> tuple[float, ...]:
        if policy == "spread":
            return placed[name], -present.get(name, 0)
        return -room[name], -present.get(name, 0)

    for _ in range(wanted):
        open_nodes = [name for name in room if placed[name] < room[name]]
        if not open_nodes:
            break
        placed[min(sorted(open_nodes), key=rank)] += 1
    return placed


def deal(chunks: Sequence[Chunk], hosts: int) -> list[list[Chunk]]:
    """Assign the chunks, which take similar time, to the hosts in turn."""
    return [list(chunks[host::hosts]) for host in range(hosts)]
