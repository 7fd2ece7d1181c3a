"""FedAvg: clients train the whole model and the server adds the weighted mean of their changes.

Reference: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.federated.dense_updates import (
    SUM,
    WEIGHT,
    Weights,
    WholeModel,
    client_weights,
    finish_dense,
    weighted_mean,
    weighted_sum,
)
from narrowcast.algorithms.federated.dense_uploads import send_tensors
from narrowcast.algorithms.federated.sums import add_up
from narrowcast.platform.contracts import LocalCall, Task
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, LocalTerms, LocalUpdates


class Averaging(WholeModel):
    """What FedAvg and its kin share: x += server_learning_rate * sum w_u (y_u - x) / sum w_u over who delivered."""

    weights: Weights = "examples"

    def terms(self, chunk: Chunk, task: Task) -> LocalTerms:
        """Plain local SGD."""
        del chunk, task
        return LocalTerms()

    def local_call(self, broadcast: Arrays, chunk: Chunk, task: Task) -> LocalCall:
        """Train the whole model."""
        return LocalCall(broadcast, chunk, task, self.terms(chunk, task))

    def upload(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> ChunkResult:
        """Add up the clients' weighted changes."""
        del broadcast
        uploads = send_tensors(task, chunk, updates, updates.changes, Codec(self.codec))
        weight = client_weights(self.weights, task, chunk, uploads.delivered)
        partial = {**weighted_sum(uploads.changes, weight), WEIGHT: np.array(weight.sum())}
        return finish_dense(chunk, updates, uploads, partial)

    def fold(self, partials: Sequence[Arrays]) -> Arrays:
        """The sum over all chunks."""
        return add_up(partials)

    def weighted_by_staleness(self, partial: Arrays, factor: float) -> Arrays:
        """The weighted changes times `factor`, and their weight as it is."""
        return {name: values * factor if name.startswith(SUM) else values for name, values in partial.items()}

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays) -> Arrays:
        """Add the mean change."""
        del broadcast
        rate = self.server_learning_rate
        return {name: values + rate * weighted_mean(total, name) for name, values in server.items()}


class FedAvg(Averaging):
    """The weighted mean of the clients' models.

    Differs from the paper: 1. the change is averaged and scaled by `server_learning_rate`; 1 gives the paper's mean of
    models.
    """

    kind: Literal["fedavg"] = "fedavg"
