"""Which host trains which chunk; results never depend on it."""

from __future__ import annotations

from collections.abc import Sequence

from narrowcast.platform.types import Chunk


def deal(chunks: Sequence[Chunk], hosts: int) -> list[list[Chunk]]:
    """Deal the chunks, which are alike in work, to the hosts in turn."""
    return [list(chunks[host::hosts]) for host in range(hosts)]
