"""FedMF: federated averaging of the whole item matrix.

Reference: Chai et al., Secure Federated Matrix Factorization, IEEE Intelligent Systems 2020; McMahan et al., AISTATS
2017. The baseline of Nguyen et al., WWW 2024 (arXiv:2401.03748).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.coded_rows import LIKELY
from narrowcast.algorithms.codecs.rows import RowLayout, RowsPayload
from narrowcast.algorithms.codecs.stages import Stages
from narrowcast.algorithms.federated.codec_state import init_codec_state
from narrowcast.algorithms.federated.row_updates import (
    Aggregation,
    Sending,
    changed_rows,
    mean_change,
    only_factorisation,
    only_touched_rows_are_coded,
    train_and_send,
)
from narrowcast.algorithms.federated.sums import add_up
from narrowcast.algorithms.local_training.cohort import train_cohort_rows
from narrowcast.algorithms.local_training.streams import draw_samples
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
    codec: Stages = ()
    server_learning_rate: float = Field(1.0, gt=0)

    def check(self, task: Task) -> None:
        """Only matrix factorisation has rows to send."""
        only_factorisation(self.kind, task)
        only_touched_rows_are_coded(self.codec, self.rows)

    def init(self, task: Task) -> Arrays:
        """Q, and which of its rows the last round changed."""
        server = task.model.init_server(task.data, task.seed)
        return {**server, _CHANGED: np.zeros(task.data.n_items, dtype=bool)}

    def init_clients(self, task: Task) -> Arrays:
        """The user factors P, and what the codec keeps."""
        clients = task.model.init_clients(task.data, task.seed)
        rows = {LIKELY: (task.data.n_items, clients[USER_FACTORS].shape[1])}
        return {**clients, **init_codec_state(Codec(self.codec), task.data.n_clients, rows)}

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
        samples = draw_samples(task.data, chunk.clients, task.training, task.seed, chunk.round_index)
        item_factors = np.asarray(broadcast[ITEM_FACTORS])
        every_column = np.ones((len(samples.order), item_factors.shape[1]), dtype=bool)
        how = Sending(self.aggregation, self.rows, Codec(self.codec))
        train = partial(train_cohort_rows, item_factors, chunk, task, samples)
        return train_and_send(how, task, chunk, samples, every_column, train)

    def fold(self, partials: Sequence[Arrays]) -> Arrays:
        """The sum over all chunks."""
        return add_up(partials)

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays) -> Arrays:
        """Q += mean change."""
        del broadcast
        item_factors = np.asarray(server[ITEM_FACTORS]) + np.float32(self.server_learning_rate) * mean_change(total)
        return {ITEM_FACTORS: item_factors, _CHANGED: changed_rows(total)}

    def final(self, server: Arrays) -> Arrays:
        """Q."""
        return {ITEM_FACTORS: server[ITEM_FACTORS]}
