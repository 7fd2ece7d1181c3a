"""What is decided when a part of the cluster fails; acting on it is left to whoever asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from narrowcast.platform.errors import RunFailed

Reaction = Literal["redo", "drop"]
_HOSTS_PER_CHUNK = 5  # that may fail on it in a round, before it is taken to be the chunk that kills them


@dataclass(frozen=True)
class Failure:
    """A host that died, or did not answer in time, and what it was at.

    `attempts` counts the hosts that failed in this round on the chunk that had most; `settled` says that the round is
    written down already, and is only played again.
    """

    round_index: int
    node: str
    problem: str
    attempts: int = 1
    settled: bool = False


@dataclass(frozen=True)
class FailurePolicy:
    """What a run does about failures, and how many it puts up with; a node that takes several hosts along is one.

    `redo` trains the chunks of a failed host elsewhere, which costs time and never results. `drop` takes their clients
    for stragglers of this round, which costs results and no time; a round that is written down is redone all the same,
    for it must come out as it did.
    """

    reaction: Reaction
    failures_left: int
    round_timeout_seconds: float
    last: tuple[int, str] | None = None

    def decide(self, failure: Failure) -> tuple[Reaction, FailurePolicy]:
        """What to do, and the policy after this failure; `RunFailed` where there has been one too many."""
        policy = self
        if self.last != (failure.round_index, failure.node):
            policy = replace(self.spend(failure.problem), last=(failure.round_index, failure.node))
        reaction: Reaction = "redo" if failure.settled else self.reaction
        if reaction == "redo" and failure.attempts >= _HOSTS_PER_CHUNK:
            raise RunFailed(
                f"round {failure.round_index}: {failure.attempts} hosts failed on the same clients, last: "
                f"{failure.problem}; look at the cluster's logs (memory?), then resume, maybe with a lower chunk_size"
            )
        return reaction, policy

    def spend(self, problem: str) -> FailurePolicy:
        """The policy after one more failure, or `RunFailed` where none was left."""
        if self.failures_left == 0:
            raise RunFailed(
                f"the cluster failed once too often, last: {problem}; look at its logs, then resume, "
                "or raise backend.max_failures"
            )
        return replace(self, failures_left=self.failures_left - 1)
