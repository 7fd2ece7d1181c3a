"""The outcome of a round: its record, ledger and metrics, and where its wall time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from narrowcast.platform.state import RunState
from narrowcast.platform.types import ChunkResult, FloatArray, RoundLedger, RoundRecord


@dataclass(frozen=True)
class Timing:
    """The wall seconds of a round's parts, which add up to the round; reported only, no result depends on them.

    `broadcast` covers the sampling of the cohort, the channel and the broadcast. `train` and `encode` share the time
    until all chunks are back, in proportion to the time that the clients' hosts spent on each. `aggregate` is the
    server's work after that, without `evaluate`.
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
        """Split the time between four moments: the start of the round, chunks made, chunks trained, and its end."""
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


@dataclass(frozen=True)
class Outcome:
    """The result of one round, yielded by the round loop.

    `metrics` is empty unless an evaluation was due, and `state` is None unless a checkpoint is due. `client_metrics`
    are those of each client by `split.metric`, [U] each, if the plan asks for them.
    """

    record: RoundRecord
    ledger: RoundLedger
    metrics: Mapping[str, float]
    wall_seconds: float
    state: RunState | None
    timing: Timing = field(default_factory=Timing)
    client_metrics: Mapping[str, FloatArray] = field(default_factory=dict)

    def timed(self, moments: Sequence[float], results: Sequence[ChunkResult], share: float = 1.0) -> Outcome:
        """Return the outcome with its wall time, of which this run takes the given share; see `Timing.of`."""
        timing = Timing.of(moments, results, self.timing.evaluate, share)
        return replace(self, wall_seconds=share * (moments[-1] - moments[0]), timing=timing)
