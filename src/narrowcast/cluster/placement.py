"""Which node hosts how many, and which host trains which chunk; results never depend on either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from narrowcast.platform.types import Chunk

Policy = Literal["spread", "pack"]
_ROUNDING = 1e-6  # three hosts with a third of a GPU each fit on one


@dataclass(frozen=True)
class Node:
    """A machine of the cluster and what it offers: CPUs, GPUs and custom resources, by name."""

    name: str
    offers: Mapping[str, float]

    def room_for(self, need: Mapping[str, float], most: int) -> int:
        """How many hosts that need so much each it has room for, at most `most`."""
        fits = [(self.offers.get(kind, 0.0) + _ROUNDING) // each for kind, each in need.items() if each > 0]
        return int(min([*fits, most]))


def place(
    room: Mapping[str, int], wanted: int, policy: Policy, present: Mapping[str, int] | None = None
) -> dict[str, int]:
    """How many of the wanted hosts each node gets; fewer in all where there is no room for more.

    `room` says how many hosts fit on each node. `spread` gives the next host to the node that has the fewest, `pack`
    fills the roomiest first; where nodes are equal, the one goes first where more are `present`: placing again moves
    nobody.
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
    """Deal the chunks, which are alike in work, to the hosts in turn."""
    return [list(chunks[host::hosts]) for host in range(hosts)]
