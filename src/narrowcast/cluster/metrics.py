"""Metrics of a run for Ray, scraped by Prometheus: duration of rounds, throughput and queued chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ray.util import metrics as ray_metrics

from narrowcast.cluster.ray_executor import RayExecutor
from narrowcast.platform.client_contracts import ClientSplit
from narrowcast.platform.outcome import Outcome
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, ClientMeasures

_RUN = ("run",)


class RunMetrics:
    """The gauges and counters of a run, each labelled with its name."""

    def __init__(self, run: str) -> None:
        self._labels = {"run": run}
        self._round = ray_metrics.Gauge("narrowcast_round", "completed rounds", _RUN)
        self._round_seconds = ray_metrics.Gauge("narrowcast_round_seconds", "wall time of the last round", _RUN)
        self._part_seconds = ray_metrics.Gauge(
            "narrowcast_round_part_seconds", "wall time of its parts", (*_RUN, "part")
        )
        self._clients = ray_metrics.Gauge(
            "narrowcast_clients_per_second", "clients trained per second in the last round", _RUN
        )
        self._bits = ray_metrics.Gauge(
            "narrowcast_uplink_bits_per_second", "uplink bits produced per second in the last round", _RUN
        )
        self._total_clients = ray_metrics.Counter("narrowcast_clients", "participations", _RUN)
        self._total_bits = ray_metrics.Counter("narrowcast_uplink_bits", "uplink of all clients", _RUN)
        self._queue = ray_metrics.Gauge("narrowcast_queued_chunks", "chunks waiting for or at the client hosts", _RUN)

    def queued(self, chunks: int) -> None:
        """Set the number of chunks that are not trained yet."""
        self._queue.set(chunks, self._labels)

    def record(self, outcome: Outcome) -> None:
        """Update the metrics with a finished round."""
        row, seconds = outcome.record, max(outcome.wall_seconds, 1e-9)
        self._round.set(row.round, self._labels)
        self._round_seconds.set(outcome.wall_seconds, self._labels)
        for part, its_seconds in vars(outcome.timing).items():
            self._part_seconds.set(its_seconds, {**self._labels, "part": part})
        self._clients.set(row.clients / seconds, self._labels)
        self._bits.set(row.uplink_bits / seconds, self._labels)
        if row.clients:  # Ray's counters refuse a zero
            self._total_clients.inc(row.clients, self._labels)
        if row.uplink_bits:
            self._total_bits.inc(row.uplink_bits, self._labels)


@dataclass(frozen=True)
class Metered:
    """An executor that reports its queue to the metrics."""

    executor: RayExecutor
    metrics: RunMetrics

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """Train the chunks on the wrapped executor."""
        self.metrics.queued(len(chunks))
        results = self.executor.train(broadcast, chunks)
        self.metrics.queued(0)
        return results

    def measure(
        self, broadcast: Arrays, chunks: Sequence[Chunk], splits: Sequence[ClientSplit]
    ) -> list[ClientMeasures]:
        """Measure the clients on the wrapped executor."""
        return self.executor.measure(broadcast, chunks, splits)
