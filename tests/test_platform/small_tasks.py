"""Two small tasks on log-normal links and devices: rows of matrix factorisation, and a network on random images."""

from __future__ import annotations

from typing import Any

import numpy as np

from narrowcast.algorithms.local_training.factorisation_sgd import FactorisationSGD
from narrowcast.algorithms.local_training.sgd import SGD
from narrowcast.platform.contracts import Algorithm, Task
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.local_backend import LocalExecutor
from narrowcast.platform.models.matrix_factorisation import MatrixFactorisation
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.simulation.fleet import LogNormal, LogNormalFleet
from narrowcast.platform.types import Arrays, Chunk, ChunkResult

FLEET = LogNormalFleet(
    uplink_mbit_per_second=LogNormal(median=0.01, sigma=1.0), compute_speed=LogNormal(median=1.0, sigma=1.0)
)


def rows_task(n_users: int = 12, seed: int = 0) -> Task:
    random = np.random.default_rng(0)
    orders = [random.permutation(130) for _ in range(n_users)]
    counts = random.integers(1, 25, n_users)
    data = Interactions(
        name="tiny",
        source="random",
        n_items=130,
        indptr=np.concatenate([[0], np.cumsum(counts)]),
        items=np.concatenate([np.sort(order[:count]) for order, count in zip(orders, counts, strict=True)]),
        validation=np.array([order[-1] for order in orders]),
        test=np.array([order[-2] for order in orders]),
        negatives=np.stack([order[-101:-2] for order in orders]),
    )
    profiles = FLEET.profiles(data.examples, seed)
    return Task(data, profiles, MatrixFactorisation(embedding_dim=8), FactorisationSGD(batch_size=16), seed)


def network_task(n_clients: int = 12, seed: int = 0, **training: Any) -> Task:
    random = np.random.default_rng(0)
    counts = random.integers(1, 18, n_clients)
    total = int(counts.sum())
    labels = random.integers(0, 3, total + 20)
    features = (random.random((total + 20, 1, 4, 4)) + labels[:, None, None, None]).astype(np.float32)
    data = Samples(
        name="tiny",
        source="random",
        n_classes=3,
        train=Labelled(features[:total], labels[:total]),
        validation=Labelled(features[:0], labels[:0]),
        test=Labelled(features[total:], labels[total:]),
        order=random.permutation(total),
        indptr=np.concatenate([[0], np.cumsum(counts)]),
    )
    settings = SGD(**{"batch_size": 4, "epochs": 2, **training})
    return Task(data, FLEET.profiles(data.examples, seed), MLP(hidden=(6,)), settings, seed)


class Counting:
    """Trains as in process, and notes the chunks of each call."""

    def __init__(self, algorithm: Algorithm, task: Task) -> None:
        self._inner = LocalExecutor(algorithm, task)
        self.calls: list[list[Chunk]] = []

    def train(self, broadcast: Arrays, chunks: list[Chunk]) -> list[ChunkResult]:
        self.calls.append(list(chunks))
        return self._inner.train(broadcast, chunks)
