"""Decisions on a cluster as pure functions: what a failure means, what a run requests, and what runs where.

The caller acts on them. Results depend neither on the placement of hosts on nodes nor on that of chunks on hosts.
Importing this imports neither Ray nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, field_validator

from narrowcast.platform.config.files import Section
from narrowcast.platform.errors import RunFailed, UserError
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
        fits = [(self.offers.get(kind, 0.0) + _ROUNDING) // amount for kind, amount in need.items() if amount > 0]
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


class HostResources(Section):
    """The number of client hosts, and the resources that each needs on its node."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["ray"] = "ray"
    actors: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] = Field(
        2,
        description="client hosts; auto: as many as fit on the nodes at the time, at most one per chunk",
    )
    clients_per_actor: int | None = Field(None, ge=1, description="in place of actors: clients of a round per host")
    cpus_per_actor: float = Field(1.0, ge=0, description="CPUs per client host")
    gpus_per_actor: float = Field(0.0, ge=0, description="GPUs per client host; 0.5 lets two share one")
    resources_per_actor: dict[str, float] = Field({}, description="custom resources per client host, such as {edge: 1}")

    @field_validator("resources_per_actor")
    @classmethod
    def _are_custom(cls, value: dict[str, float]) -> dict[str, float]:
        for name, amount in value.items():
            if name in ("CPU", "GPU", "memory", "object_store_memory") or not 0 < amount <= 1e6:
                raise ValueError(f"{name}: {amount:g}: give custom resources, each above 0; CPUs and GPUs have fields")
        return value

    @property
    def least_actors(self) -> int:
        """The least number of hosts that a round needs, as far as known before the cohort is drawn."""
        return 1 if self.actors == "auto" or self.clients_per_actor is not None else self.actors

    def need(self) -> dict[str, float]:
        """Return what a client host needs on its node, by the names of Ray's resources."""
        return {"CPU": self.cpus_per_actor, "GPU": self.gpus_per_actor, **self.resources_per_actor}


def check_address_of(backend: str | None, address: str | None) -> None:
    """Raise `UserError` for the address of a cluster that a local backend would not join."""
    if backend == "local" and address is not None:
        raise UserError(f"--backend local runs in this process, and --address {address} on Ray; leave out one of them")
