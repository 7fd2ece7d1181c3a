"""Decisions on failures of hosts, nodes and drivers, as pure functions; the caller acts on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from narrowcast.platform.errors import RunFailed

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
