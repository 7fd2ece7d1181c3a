"""Clients whose host failed and that are given up on: stragglers of their round, and nothing worse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from narrowcast.experiment import load_experiment
from narrowcast.platform.contracts import Executor
from narrowcast.platform.rounds.chunks import make_chunks
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.rounds.loop import LocalExecutor, rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import Population, Run
from narrowcast.platform.types import Arrays, Chunk
from running import local

SETTINGS = ("rounds=5", "chunk_size=5", "checkpoint_every=5", "checkpoint_seconds=600", "evaluate_every=5")
ALGORITHMS = ("{kind: fedavg, aggregator: median}", "scaffold", "{kind: fedavg, codec: quantise}")


@dataclass(frozen=True)
class Failing(Executor):
    """Gives up on the first `chunks` chunks of round 3."""

    inner: LocalExecutor
    chunks: int

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        results = self.inner.train(broadcast, chunks)
        for place in range(self.chunks if chunks[0].round_index == 3 else 0):
            results[place] = ChunkResult.of_dropped(chunks[place])
        return results


def played(chunks: int, *settings: str) -> list[Outcome]:
    experiment = load_experiment("fedavg-digits", [*SETTINGS, *settings])
    task = experiment.task(experiment.data.load())
    executor = Failing(local(experiment.algorithm, task), chunks)
    return list(rounds(Run(experiment, experiment.algorithm, task), executor))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_dropped_clients_are_stragglers_of_their_round(algorithm: str) -> None:
    whole, dropped = played(0, f"algorithm={algorithm}"), played(1, f"algorithm={algorithm}")
    assert [outcome.record for outcome in dropped[:2]] == [outcome.record for outcome in whole[:2]]
    record, ledger = dropped[2].record, dropped[2].ledger
    assert (record.clients, record.delivered, record.late) == (20, 15, 5)
    assert record.uplink_bits < whole[2].record.uplink_bits
    assert record.downlink_bits == whole[2].record.downlink_bits  # they were sent the model
    assert not ledger.uplink_bits[ledger.late].any()
    assert np.isnan(ledger.loss[ledger.late]).all()
    assert [outcome.record.delivered for outcome in dropped[3:]] == [20, 20]


def test_a_round_with_dropped_clients_is_kept_at_once() -> None:
    """Else playing it again after a restart would give another model than the one that was written down."""
    assert [outcome.record.round for outcome in played(1) if outcome.state] == [3, 5]


def test_a_round_of_which_nothing_came_back_leaves_the_server_as_it_was() -> None:
    outcomes = played(4, "checkpoint_every=1")
    before, after = outcomes[1].state, outcomes[2].state
    assert before is not None
    assert after is not None
    assert (outcomes[2].record.delivered, outcomes[2].record.late) == (0, 20)
    for name, values in before.server.items():
        assert np.array_equal(values, after.server[name])


@pytest.mark.parametrize(
    "settings",
    [
        ["over_selection=1.3", "deadline_seconds=1000"],
        ["over_selection=1.3", "algorithm={kind: fedavg, codec: quantise}"],
        ["schedule={kind: buffered, concurrency: 20, buffer_size: 10}"],
    ],
    ids=["deadline", "trained-twice", "buffered"],
)
def test_dropped_clients_go_with_deadlines_and_buffers(settings: list[str]) -> None:
    whole, dropped = played(0, *settings), played(1, *settings)
    assert any(outcome.record != other.record for outcome, other in zip(dropped, whole, strict=True))
    lost = [outcome for outcome in dropped if (outcome.ledger.late & (outcome.ledger.uplink_bits == 0)).any()]
    assert lost
    assert all(outcome.state is not None for outcome in lost)


@dataclass(frozen=True)
class FailingOnce(Executor):
    """Gives up on a chunk of round 3 when that is trained first, and notes the chunks of each call of the round."""

    inner: LocalExecutor
    calls: list[list[int]] = field(default_factory=list)

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        results = self.inner.train(broadcast, chunks)
        if chunks and chunks[0].round_index == 3:
            if not self.calls:
                results[1] = ChunkResult.of_dropped(chunks[1])
            self.calls.append([chunk.index for chunk in chunks])
        return results


def test_a_dropped_chunk_is_not_trained_again_where_the_lateness_of_others_has_to_be() -> None:
    """Sizes are known only after the training, and 24 clients are asked for 18: the first 18 uploads count."""
    settings = ("rounds=3", "clients_per_round=18", "over_selection=1.3", "checkpoint_every=1", "evaluate_every=3")
    codec = "algorithm={kind: fedavg, codec: [{kind: quantise}, {kind: entropy}]}"
    experiment = load_experiment("fedavg-digits", [*SETTINGS, *settings, "chunk_size=5", codec, "data.clients=60"])
    task = experiment.task(experiment.data.load())
    algorithm = experiment.algorithm
    executor = FailingOnce(local(algorithm, task))
    outcomes = list(rounds(Run(experiment, algorithm, task), executor))
    ledger = outcomes[2].ledger
    first, *again = executor.calls
    assert first == [0, 1, 2, 3, 4]
    assert again
    assert all(1 not in call for call in again)

    gone = ledger.late & (ledger.uplink_bits == 0)
    assert 4 <= gone.sum() <= 5
    arrived = sorted(np.flatnonzero(~gone), key=lambda place: ledger.seconds[place])[:18]
    assert np.array_equal(np.flatnonzero(ledger.delivered), np.sort(arrived))

    before, after = outcomes[1].state, outcomes[2].state
    assert before is not None
    assert after is not None
    broadcast = algorithm.broadcast(before.server, task, 3).arrays
    population = Population.fresh(algorithm.init_clients(task), task.data.n_clients)
    partials = []
    for client in ledger.client[ledger.delivered]:
        (alone,) = make_chunks(np.array([client]), task.data.examples, 1, 3, population)
        partials.append(algorithm.train(broadcast, alone, task).partial)
    weight = sum(float(each["weight"]) for each in partials)
    for name, values in before.server.items():
        mean = sum(each[f"sum/{name}"].astype(np.float64) for each in partials) / weight
        np.testing.assert_allclose(after.server[name], values + mean, rtol=1e-5, atol=1e-7)
