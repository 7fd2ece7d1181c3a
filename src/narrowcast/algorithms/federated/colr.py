"""CoLR: correlated low-rank updates, a frozen basis B shared by all clients of a round and regenerated from a seed.

Reference: Nguyen et al., Towards Efficient Communication and Secure Federated Recommendation System via Low-rank
Training, WWW 2024 (arXiv:2401.03748), section 4.3 and Algorithm 1. Letters: Q [N, d], A [N, r], B [r, d].
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from narrowcast.algorithms.codecs.rows import RowLayout, RowsPayload
from narrowcast.algorithms.federated.row_updates import Aggregation, changed_rows, finish_chunk, mean_change
from narrowcast.algorithms.local_training.batches import ChunkBatches, draw_batches
from narrowcast.algorithms.local_training.factorisation import train_low_rank
from narrowcast.platform.contracts import Broadcast, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.matrix_factorisation import ITEM_FACTORS, USER_FACTORS
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays, BoolArray, Chunk, ChunkResult

BasisKind = Literal["orthonormal", "gaussian"]
"""`orthonormal`: orthogonal rows of norm sqrt(d / r), the polar factor of a Gaussian matrix, as the released code draws
it; `gaussian`: entries N(0, 1/r), as the paper's theory has it."""

_BASIS, _UPDATE, _CHANGED = "basis", "update", "changed_rows"


class LowRank(BaseModel):
    """The fields that CoLR and SCoLR share; `rank` is r, and r_g of SCoLR."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(4, ge=1, description="rank of the global update; at most model.embedding_dim")
    basis: BasisKind = "orthonormal"
    aggregation: Aggregation = "per_item_mean"
    rows: RowLayout = "touched"

    def check(self, task: Task) -> None:
        """The rank must not exceed the embedding dimension."""
        dimension = task.model.init_server(task.data, task.seed)[ITEM_FACTORS].shape[1]
        if self.rank > dimension:
            raise UserError(
                f"algorithm.rank = {self.rank} is above model.embedding_dim = {dimension}; "
                f"use a rank of 1 to {dimension}, or a larger embedding_dim"
            )

    def init(self, task: Task) -> Arrays:
        """Q, and the low-rank change that the last round made to it."""
        server = task.model.init_server(task.data, task.seed)
        n_items = task.data.n_items
        update = np.zeros((n_items, self.rank), dtype=np.float32)
        return {**server, _UPDATE: update, _CHANGED: np.zeros(n_items, dtype=bool)}

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Q for a newcomer; the last round's A and the seed of its B for a client that holds the rest."""
        item_factors = np.asarray(server[ITEM_FACTORS])
        n_items, dimension = item_factors.shape
        changed = np.flatnonzero(server[_CHANGED])
        update = np.asarray(server[_UPDATE])[changed]
        seed = basis_seed(task.seed, round_index)
        return Broadcast(
            {
                ITEM_FACTORS: item_factors,
                _BASIS: draw_basis(self.basis, self.rank, dimension, seed),
            },
            full=RowsPayload(n_items, np.arange(n_items), item_factors, "all", mask=False, seed=seed),
            update=RowsPayload(n_items, changed, update, self.rows, mask=False, seed=seed) if round_index > 1 else None,
        )

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays) -> Arrays:
        """A = mean of the clients' A; Q += A B."""
        update = mean_change(total)
        change = torch.from_numpy(update) @ torch.from_numpy(np.array(broadcast[_BASIS]))
        item_factors = np.asarray(server[ITEM_FACTORS]) + change.numpy()
        return {ITEM_FACTORS: item_factors, _UPDATE: update, _CHANGED: changed_rows(total)}

    def final(self, server: Arrays) -> Arrays:
        """Q."""
        return {ITEM_FACTORS: server[ITEM_FACTORS]}


class CoLR(LowRank):
    """Every client trains and sends all r columns of A; the server adds mean(A) B.

    Differs from the paper: 1. the released code's `per_item_mean` is the default aggregation, Algorithm 1's weights are
    `weighted`. 2. the row mask that `per_item_mean` needs is sent and paid for. 3. `rows: touched` leaves out the rows
    of A that are zero; `all` sends them, as the paper counts.
    """

    kind: Literal["colr"] = "colr"

    def train(self, broadcast: Arrays, chunk: Chunk, task: Task) -> ChunkResult:
        """Train the chunk's clients on all components."""
        batches = draw_batches(task.data, chunk.clients, task.training, task.seed, chunk.round_index)
        components = np.ones((len(chunk.clients), self.rank), dtype=bool)
        return train_components(self, broadcast, chunk, task, batches, components)


def train_components(
    algorithm: LowRank,
    broadcast: Arrays,
    chunk: Chunk,
    task: Task,
    batches: ChunkBatches,
    components: BoolArray,
) -> ChunkResult:
    """Train each client's own components of A; `components` [C, r] is in the order of `batches.order`.

    The gradient of A is scaled by sqrt(r/d) (section 5.1).
    """
    basis = torch.from_numpy(np.array(broadcast[_BASIS]))
    result = train_low_rank(
        torch.from_numpy(np.array(broadcast[ITEM_FACTORS])),
        torch.from_numpy(np.asarray(chunk.state[USER_FACTORS])[batches.order]),
        basis,
        torch.from_numpy(components).to(basis),
        (basis.shape[0] / basis.shape[1]) ** 0.5,
        batches,
        task.training,
    )
    return finish_chunk(task, chunk, batches, result, components, algorithm.aggregation, algorithm.rows)


def basis_seed(seed: int, round_index: int) -> int:
    """The 64-bit seed that the server sends for the basis of a round."""
    return int(generator(seed, "basis", round_index).integers(2**64, dtype=np.uint64))


def draw_basis(kind: BasisKind, rank: int, dimension: int, seed: int) -> NDArray[np.float32]:
    """B [r, d] from its seed; E[B^T B] = I for both kinds."""
    gaussian = generator(seed, kind).standard_normal((rank, dimension))
    if kind == "gaussian":
        return (gaussian / rank**0.5).astype(np.float32)
    left, _, right = np.linalg.svd(gaussian, full_matrices=False)
    return np.ascontiguousarray(left @ right * (dimension / rank) ** 0.5, dtype=np.float32)
