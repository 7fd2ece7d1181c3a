"""Placement of hosts on nodes and of chunks on hosts, as pure functions; results depend on neither."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from narrowcast.platform.types import Chunk

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
