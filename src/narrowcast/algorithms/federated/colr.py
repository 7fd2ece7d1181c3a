"""CoLR: correlated low-rank updates, a frozen basis B shared by all clients of a round and regenerated from a seed.

Reference: Nguyen et al., Towards Efficient Communication and Secure Federated Recommendation System via Low-rank
Training, WWW 2024 (arXiv:2401.03748), section 4.3 and Algorithm 1. Letters: Q [N, d], A [N, r], B [r, d].
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.rows import RowLayout, RowsPayload
from narrowcast.algorithms.codecs.stages import Stages
from narrowcast.algorithms.federated.low_rank_network import (
    broadcast_network,
    final_network,
    init_network,
    network_call,
    network_upload,
    step_network,
)
from narrowcast.algorithms.federated.row_updates import (
    changed_rows,
    mean_change,
    only_touched_rows_are_coded,
    train_and_send,
)
from narrowcast.algorithms.federated.row_uploads import Aggregation, Sending
from narrowcast.algorithms.federated.shared_basis import BasisKind, basis_seed, draw_basis
from narrowcast.algorithms.federated.sums import add_up
from narrowcast.algorithms.local_training.cohort import train_cohort_components, train_cohort_rows
from narrowcast.algorithms.local_training.streams import ChunkSamples, draw_samples
from narrowcast.algorithms.local_training.subspace import Subspace
from narrowcast.platform.contracts import AlgorithmDefaults, Broadcast, LocalCall, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.matrix_factorisation import ITEM_FACTORS, MatrixFactorisation
from narrowcast.platform.types import Arrays, BoolArray, Chunk, ChunkResult, IntArray, LocalUpdates

_BASIS, _UPDATE, _CHANGED = "basis", "update", "changed_rows"


class LowRank(AlgorithmDefaults, BaseModel):
    """The fields that CoLR and SCoLR share; `rank` is r, and r_g of SCoLR."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    rank: int = Field(4, ge=1, description="rank of the global update; at most model.embedding_dim")
    basis: BasisKind | Literal["own"] = "orthonormal"
    aggregation: Aggregation = "per_item_mean"
    rows: RowLayout = "touched"
    codec: Stages = ()
    server_learning_rate: float = Field(1.0, gt=0, description="times the mean; below 1 averages out what few send")

    def check(self, task: Task) -> None:
        """The rank must not exceed the embedding dimension; a network's smaller weights take what they can."""
        only_touched_rows_are_coded(self.codec, self.rows)
        if stateful := [stage.kind for stage in self.codec if stage.kind in ("error_feedback", "power_sgd")]:
            raise UserError(
                f"algorithm.codec has {stateful[0]}, which remembers from round to round, but {self.kind} sends in a "
                "basis that each round draws anew; use it with fedmf or fedavg"
            )
        if self.basis == "own":
            self._check_own_basis()
        if not isinstance(task.model, MatrixFactorisation):
            return
        dimension = task.model.embedding_dim
        if self.rank > dimension:
            raise UserError(
                f"algorithm.rank = {self.rank} is above model.embedding_dim = {dimension}; "
                f"use a rank of 1 to {dimension}, or a larger embedding_dim"
            )

    def _check_own_basis(self) -> None:
        wrong = {
            "a codec that does not quantise; put quantise into algorithm.codec": Codec(self.codec).levels is None,
            "algorithm.aggregation = per_component_mean; use per_item_mean": self.aggregation == "per_component_mean",
        }
        if found := [what for what, holds in wrong.items() if holds]:
            raise UserError(f"algorithm.basis = own does not go with {found[0]}")

    def init(self, task: Task) -> Arrays:
        """Q, and the low-rank change that the last round made to it."""
        server = task.model.init_server(task.data, task.seed)
        if ITEM_FACTORS not in server:
            return init_network(self, server)
        n_items = task.data.n_items
        width = len(self.draw_basis(server[ITEM_FACTORS].shape[1], task.seed))
        update = np.zeros((n_items, width), dtype=np.float32)
        return {**server, _UPDATE: update, _CHANGED: np.zeros(n_items, dtype=bool)}

    def init_clients(self, task: Task) -> Arrays:
        """The user factors P."""
        return task.model.init_clients(task.data, task.seed)

    def draw_basis(self, dimension: int, seed: int) -> NDArray[np.float32]:
        """B [r, d] of a round; where clients have bases of their own, the mean of what they send is not low-rank."""
        if self.basis == "own":
            return np.eye(dimension, dtype=np.float32)
        return draw_basis(self.basis, self.rank, dimension, seed)

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Q for a newcomer; the last round's A and the seed of its B for a client that holds the rest."""
        seed = basis_seed(task.seed, round_index)
        if ITEM_FACTORS not in server:
            return broadcast_network(self, server, seed, first=round_index == 1)
        item_factors = np.asarray(server[ITEM_FACTORS])
        n_items, dimension = item_factors.shape
        changed = np.flatnonzero(server[_CHANGED])
        update = np.asarray(server[_UPDATE])[changed]
        sent = None if self.basis == "own" else seed
        return Broadcast(
            {
                ITEM_FACTORS: item_factors,
                _BASIS: self.draw_basis(dimension, seed),
            },
            full=RowsPayload(n_items, np.arange(n_items), item_factors, "all", mask=False, seed=sent),
            update=RowsPayload(n_items, changed, update, self.rows, mask=False, seed=sent) if round_index > 1 else None,
        )

    def ranks(self, broadcast: Arrays, chunk: Chunk, task: Task) -> IntArray:
        """The rank at which each client of the chunk trains a network, [C]."""
        raise NotImplementedError

    def local_call(self, broadcast: Arrays, chunk: Chunk, task: Task) -> LocalCall | None:
        """The local training of a network; the rows of Q are trained by a program of their own."""
        if ITEM_FACTORS in broadcast:
            return None
        return network_call(self, broadcast, chunk, task, self.ranks(broadcast, chunk, task))

    def upload(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> ChunkResult:
        """What the clients of a network send."""
        return network_upload(self, broadcast, chunk, task, self.ranks(broadcast, chunk, task), updates)

    def train(self, broadcast: Arrays, chunk: Chunk, task: Task) -> ChunkResult:
        """The client half: train a chunk of clients on their components."""
        call = self.local_call(broadcast, chunk, task)
        if call is None:
            return self.train_rows(broadcast, chunk, task)
        updates = task.training.train(call.server, chunk, task, call.terms)
        began = time.perf_counter()
        return self.upload(broadcast, chunk, task, updates).encoded_since(began)

    def train_rows(self, broadcast: Arrays, chunk: Chunk, task: Task) -> ChunkResult:
        """Train a chunk of matrix-factorisation clients."""
        raise NotImplementedError

    def fold(self, partials: Sequence[Arrays]) -> Arrays:
        """The sum over all chunks."""
        return add_up(partials)

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays) -> Arrays:
        """A = mean of the clients' A, times the server's learning rate; Q += A B."""
        if ITEM_FACTORS not in server:
            return step_network(self, server, broadcast, total)
        update = mean_change(total) * np.float32(self.server_learning_rate)
        change = torch.from_numpy(update) @ torch.from_numpy(np.array(broadcast[_BASIS]))
        item_factors = np.asarray(server[ITEM_FACTORS]) + change.numpy()
        return {ITEM_FACTORS: item_factors, _UPDATE: update, _CHANGED: changed_rows(total)}

    def final(self, server: Arrays) -> Arrays:
        """Q, or the network's parameters."""
        return {ITEM_FACTORS: server[ITEM_FACTORS]} if ITEM_FACTORS in server else final_network(server)


class CoLR(LowRank):
    """Every client trains and sends all r columns of A; the server adds mean(A) B.

    With `basis: own` a client trains its rows whole and sends their change in a basis of its own (`own_basis`).

    Differs from the paper: 1. the released code's `per_item_mean` is the default aggregation, Algorithm 1's weights are
    `weighted`. 2. the row mask that `per_item_mean` needs is sent and paid for. 3. `rows: touched` leaves out the rows
    of A that are zero; `all` sends them, as the paper counts.
    """

    kind: Literal["colr"] = "colr"

    def ranks(self, broadcast: Arrays, chunk: Chunk, task: Task) -> IntArray:
        """All components."""
        del broadcast, task
        return np.full(len(chunk.clients), self.rank)

    def train_rows(self, broadcast: Arrays, chunk: Chunk, task: Task) -> ChunkResult:
        """Train the chunk's clients on all components."""
        samples = draw_samples(task.data, chunk.clients, task.training, task.seed, chunk.round_index)
        if self.basis == "own":
            return train_whole_rows(self, broadcast, chunk, task, samples)
        components = np.ones((len(chunk.clients), self.rank), dtype=bool)
        return train_components(self, broadcast, chunk, task, samples, components)


def train_components(
    algorithm: LowRank,
    broadcast: Arrays,
    chunk: Chunk,
    task: Task,
    samples: ChunkSamples,
    components: BoolArray,
    levels: IntArray | None = None,
) -> ChunkResult:
    """Train each client's own components of A.

    Shapes: components [C, r] and levels [C], from which the search for those that fit sets out, in the order of
    `samples.order`.
    """
    item_factors, basis = np.asarray(broadcast[ITEM_FACTORS]), np.asarray(broadcast[_BASIS])
    how = Sending(algorithm.aggregation, algorithm.rows, Codec(algorithm.codec), levels)
    train = partial(train_cohort_components, item_factors, Subspace(basis, components), chunk, task, samples)
    return train_and_send(how, task, chunk, samples, components, train)


def train_whole_rows(
    algorithm: LowRank, broadcast: Arrays, chunk: Chunk, task: Task, samples: ChunkSamples
) -> ChunkResult:
    """Train each client's rows of Q; what it sends of them is its own choice."""
    item_factors = np.asarray(broadcast[ITEM_FACTORS])
    every_column = np.ones((len(samples.order), item_factors.shape[1]), dtype=bool)
    how = Sending(algorithm.aggregation, algorithm.rows, Codec(algorithm.codec), own_rank=algorithm.rank)
    train = partial(train_cohort_rows, item_factors, chunk, task, samples)
    return train_and_send(how, task, chunk, samples, every_column, train)
