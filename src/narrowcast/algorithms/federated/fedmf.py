"""FedMF: federated averaging of the whole item matrix.

Reference: Chai et al., Secure Federated Matrix Factorization, IEEE Intelligent Systems 2020; McMahan et al., AISTATS
2017. The baseline of Nguyen et al., WWW 2024 (arXiv:2401.03748).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from narrowcast.algorithms.codecs.rows import RowLayout, RowsPayload
from narrowcast.algorithms.federated.row_updates import Aggregation, changed_rows, finish_chunk, mean_change
from narrowcast.algorithms.local_training.batches import draw_batches
from narrowcast.algorithms.local_training.factorisation import train_rows
from narrowcast.platform.contracts import Broadcast, Task
from narrowcast.platform.models.matrix_factorisation import ITEM_FACTORS, USER_FACTORS
from narrowcast.platform.types import Arrays, Chunk, ChunkResult

_CHANGED = "changed_rows"


class FedMF(BaseModel):
    """Clients train the rows of Q they touch and send the changes; the server adds their mean.

    Differs from the paper: 1. the released code's `per_item_mean` is the default aggregation, Algorithm 1's weights are
    `weighted`. 2. `rows: touched` sends only the changed rows; `all` sends zeros too, as the paper counts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["fedmf"] = "fedmf"
    aggregation: Aggregation = "per_item_mean"
    rows: RowLayout = "touched"

    def check(self, task: Task) -> None:
        """Every dimension fits."""

    def init(self, task: Task) -> Arrays:
        """Q, and which of its rows the last round changed."""
        server = task.model.init_server(task.data, task.seed)
        return {**server, _CHANGED: np.zeros(task.data.n_items, dtype=bool)}

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Q, or its changed rows for a client that holds the last round's."""
        del task
        item_factors = np.asarray(server[ITEM_FACTORS])
        changed = np.flatnonzero(server[_CHANGED])
        full = RowsPayload(len(item_factors), np.arange(len(item_factors)), item_factors, "all", mask=False)
        update = RowsPayload(len(item_factors), changed, item_factors[changed], self.rows, mask=False)
        return Broadcast({ITEM_FACTORS: item_factors}, full, update if round_index > 1 else None)

    def train(self, broadcast: Arrays, chunk: Chunk, task: Task) -> ChunkResult:
        """Train the chunk's clients on whole rows."""
        batches = draw_batches(task.data, chunk.clients, task.training, task.seed, chunk.round_index)
        user_factors = np.asarray(chunk.state[USER_FACTORS])[batches.order]
        item_factors = np.array(broadcast[ITEM_FACTORS])
        result = train_rows(torch.from_numpy(item_factors), torch.from_numpy(user_factors), batches, task.training)
        every_column = np.ones(user_factors.shape, dtype=bool)
        return finish_chunk(task, chunk, batches, result, every_column, self.aggregation, self.rows)

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays) -> Arrays:
        """Q += mean change."""
        del broadcast
        item_factors = np.asarray(server[ITEM_FACTORS]) + mean_change(total)
        return {ITEM_FACTORS: item_factors, _CHANGED: changed_rows(total)}

    def final(self, server: Arrays) -> Arrays:
        """Q."""
        return {ITEM_FACTORS: server[ITEM_FACTORS]}
