"""FedProx: FedAvg whose clients are held near the global model, and may train for fewer epochs.

Reference: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020 (arXiv:1812.06127), Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.client.sums import SumLayout
from narrowcast.algorithms.federated.fedavg import Averaging
from narrowcast.platform.contracts import Task
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.seeds import uniform_below, uniform_unit
from narrowcast.platform.traits import Traits
from narrowcast.platform.types import Arrays, BoolArray, Chunk, IntArray, LocalTerms, LocalUpdates


class Proximal(Averaging):
    """Averaging with a proximal term, some of whose clients do part of the epochs."""

    mu: float = Field(0.01, ge=0, description="weight of the proximal term")
    partial_share: float = Field(0.0, ge=0, le=1, description="share of the clients that do part of the epochs")
    partial_draw: Literal["probability", "number"] = Field(
        "probability",
        description="these clients: each of a round with the probability partial_share, or that share of every chunk",
    )

    def terms(self, chunk: Chunk, task: Task) -> LocalTerms:
        """Return the proximal term, and the epochs that each client has time for."""
        if not self.partial_share:
            return LocalTerms(proximal=self.mu)
        keys = task.private_seed.stream_keys("partial work", chunk.round_index, chunk.clients)
        epochs = np.full(len(keys), task.training.epochs)
        fewer = 1 + uniform_below(keys, np.ones(len(keys), dtype=np.int64), epochs)
        return LocalTerms(self.mu, epochs=np.where(self.stragglers(chunk, task), fewer, epochs))

    def stragglers(self, chunk: Chunk, task: Task) -> BoolArray:
        """Return which clients of the chunk do part of the epochs, [C]."""
        keys = task.private_seed.stream_keys("partial work", chunk.round_index, chunk.clients)
        drawn = uniform_unit(keys, np.zeros(len(keys), dtype=np.int64))
        if self.partial_draw == "probability":
            return drawn < self.partial_share
        return drawn.argsort().argsort() < round(self.partial_share * len(drawn))

    def upload_bits(self, broadcast: Arrays, task: Task, clients: IntArray) -> IntArray | None:
        """Return the size of each client's upload, [C]; None if some clients do part of the epochs, or with a codec."""
        return None if self.partial_share else super().upload_bits(broadcast, task, clients)


class FedProx(Proximal):
    """FedAvg with a proximal term that holds clients near the server's model, and with partial work.

    Local steps descend F_u(y) + mu/2 ||y - x||^2; a share of the clients trains 1 to E epochs and still counts.

    Differs from the paper: 1. clients are weighted by examples and sampled without weights, where the paper samples
    them by weight and averages equally (`weights: equal` does the latter). 2. stragglers are drawn client by client
    with probability `partial_share`, where the authors' code draws a fixed number in each round (`partial_draw: number`
    does so, if a round is one chunk).
    """

    kind: Literal["fedprox"] = "fedprox"

    @property
    def traits(self) -> Traits:
        """Clients train whole models by plain steps and the proximal term."""
        return replace(super().traits, mean_unless=self.unlike_mean)

    drop_partial: bool = Field(
        False, description="do not aggregate what these clients send, as FedAvg does in the paper's comparison"
    )

    def sum_layout(self, task: Task, cohort: int) -> SumLayout | None:
        """Return the layout of FedAvg; None if uploads are dropped, which a masked sum cannot do."""
        return None if self.drop_partial and self.partial_share else super().sum_layout(task, cohort)

    def send(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: Sequence[LocalUpdates]) -> ChunkResult:
        """Send y_u - x as FedAvg does; that of stragglers counts as lost if it is dropped."""
        if self.drop_partial and self.partial_share:
            chunk = replace(chunk, lost=~chunk.arrives() | self.stragglers(chunk, task))
        return super().send(broadcast, chunk, task, updates)
