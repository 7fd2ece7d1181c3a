"""Where the wall time of a round goes; it is reported and decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from narrowcast.platform.types import ChunkResult


@dataclass(frozen=True)
class Timing:
    """Wall seconds of a round's parts, which add up to the round.

    `broadcast` is the sampling of the cohort, the channel and the broadcast; `train` and `encode` are the wait for the
    clients' hosts, shared between the two as the hosts' own time was; `aggregate` is all that the server does then.
    """

    broadcast: float = 0.0
    train: float = 0.0
    encode: float = 0.0
    aggregate: float = 0.0
    evaluate: float = 0.0

    @classmethod
    def of(
        cls, moments: Sequence[float], results: Sequence[ChunkResult], evaluate: float, share: float = 1.0
    ) -> Timing:
        """From four moments: the round's beginning, when the chunks were ready, when trained, and its end."""
        began, opened, trained, ended = moments
        hosts = sum(result.seconds for result in results)
        encoding = sum(result.encode_seconds for result in results) / hosts if hosts else 0.0
        return cls(
            broadcast=share * (opened - began),
            train=share * (trained - opened) * (1 - encoding),
            encode=share * (trained - opened) * encoding,
            aggregate=share * (ended - trained) - evaluate,
            evaluate=evaluate,
        )
