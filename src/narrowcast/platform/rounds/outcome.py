"""The outcome of a round: its record, ledger and metrics, and where its wall time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from narrowcast.platform.rounds.ledger import ChunkResult, RoundLedger, RoundRecord
from narrowcast.platform.rounds.state import RunState
from narrowcast.platform.types import FloatArray

CLIENT_METRICS_KEY = "client_metrics"
"""The part of a line of the journal with the metrics of single clients."""


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

    @property
    def step(self) -> int:
        """The round."""
        return self.record.round

    def row(self) -> dict[str, Any]:
        """Return the round's row of the journal, without its metrics and the time since the start of the run."""
        parts = {f"{part}_wall_seconds": seconds for part, seconds in vars(self.timing).items()}
        return {**self.record.row(), "round_wall_seconds": self.wall_seconds, **parts}

    def entry(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the round's line of the journal: its whole row, the ledger of its clients, and their metrics."""
        entry = {"round": row, "clients": {name: values.tolist() for name, values in vars(self.ledger).items()}}
        if self.client_metrics:
            entry[CLIENT_METRICS_KEY] = {name: values.tolist() for name, values in self.client_metrics.items()}
        return entry

    def timed(self, moments: Sequence[float], results: Sequence[ChunkResult], share: float = 1.0) -> Outcome:
        """Return the outcome with its wall time, of which this run takes the given share; see `Timing.of`."""
        timing = Timing.of(moments, results, self.timing.evaluate, share)
        return replace(self, wall_seconds=share * (moments[-1] - moments[0]), timing=timing)
