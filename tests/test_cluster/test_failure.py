"""Decisions of the failure policy, without a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from narrowcast.cluster.decisions import Failure, FailurePolicy, Reaction
from narrowcast.platform.errors import RunFailed

DIED = Failure(round_index=3, node="a", problem="ActorDiedError")


def policy(reaction: Reaction = "redo", failures: int = 2) -> FailurePolicy:
    return FailurePolicy(reaction, failures, round_timeout_seconds=1)


@pytest.mark.parametrize("reaction", ["redo", "drop"])
def test_a_failure_is_answered_as_configured_until_they_are_too_many(reaction: Reaction) -> None:
    decided, once = policy(reaction).decide(DIED)
    assert (decided, once.failures_left) == (reaction, 1)
    _, twice = once.decide(replace(DIED, node="b"))
    with pytest.raises(RunFailed, match=r"once too often, last: gone; .*resume, or raise backend.max_failures"):
        twice.decide(replace(DIED, round_index=4, problem="gone"))


def test_a_node_that_takes_its_hosts_along_fails_once() -> None:
    after = policy()
    for _ in range(8):
        _, after = after.decide(DIED)
    assert after.failures_left == 1
    assert after.decide(replace(DIED, round_index=4))[1].failures_left == 0


def test_a_chunk_that_kills_every_host_is_not_redone_for_ever() -> None:
    assert policy().decide(replace(DIED, attempts=4))[0] == "redo"
    with pytest.raises(RunFailed, match=r"round 3: 5 hosts failed on the same clients, last: ActorDiedError; .*memory"):
        policy().decide(replace(DIED, attempts=5))


def test_a_round_that_is_written_down_is_redone_whatever_is_configured() -> None:
    assert policy("drop").decide(replace(DIED, settled=True))[0] == "redo"
