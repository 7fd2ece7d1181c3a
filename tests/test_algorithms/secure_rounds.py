"""Rounds whose sum is protected, played in this process with the clients' keys in it too, and uploads that are lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from narrowcast.algorithms.secure.secured import Secured
from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.contracts import Dataset, DataSource, Task
from narrowcast.platform.local_backend import LocalExecutor
from narrowcast.platform.rounds import Outcome, model_sha256, rounds, start
from narrowcast.platform.types import Arrays, Chunk, ChunkResult

SMALL_CKKS = "{kind: ckks, ring: 4096, prime_bits: [48, 60], bits: 16}"
SCHEMES = ("{kind: plain, bits: 16}", "{kind: masked, bits: 16}", SMALL_CKKS)


@cache
def dataset(source: DataSource) -> Dataset:
    return source.load()


def experiment(secure: str, *settings: str, name: str = "scolr-ml100k") -> Experiment:
    """Three rounds of ten clients; on MovieLens with unequal ranks up to 3."""
    small = ["algorithm={kind: scolr, rank: 3, rank_policy: uniform}", "model.embedding_dim=8"] * (
        name != "fedavg-digits"
    )
    return load_experiment(name, ["rounds=3", "clients_per_round=10", f"secure={secure}", *small, *settings])


def prepared(chosen: Experiment) -> tuple[Any, Task]:
    return chosen.secured_algorithm, chosen.task(dataset(chosen.data))


@dataclass(frozen=True)
class Losing:
    """Loses the uploads of these clients of every round's cohort, after their masks are agreed."""

    executor: Any
    seats: tuple[int, ...]

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        cohort = np.sort(np.concatenate([chunk.clients for chunk in chunks]))
        lost = cohort[list(self.seats)]
        return self.executor.train(
            broadcast, [replace(each, lost=~each.arrives() | np.isin(each.clients, lost)) for each in chunks]
        )


def play(chosen: Experiment, *, lose: tuple[int, ...] = (), state: Any = None) -> list[Outcome]:
    algorithm, task = prepared(chosen)
    if not isinstance(algorithm, Secured):
        return list(
            rounds(chosen, algorithm, task, Losing(LocalExecutor(algorithm, task), lose), start(algorithm, task))
        )
    key_store = algorithm.key_store()
    executor = algorithm.over(Losing(LocalExecutor(algorithm, task, key_store), lose), key_store, task)
    return list(rounds(chosen, algorithm, task, executor, state or start(algorithm, task)))


def sha256(chosen: Experiment, outcomes: list[Outcome]) -> str:
    assert outcomes[-1].state is not None
    return model_sha256(chosen.secured_algorithm, outcomes[-1].state)
