"""The coordinate-wise median of the clients' updates: robust to a minority of arbitrary ones.

Reference: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018
(arXiv:1803.01498), Algorithm 1, option I.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.federated.dense_updates import WholeModel, finish_dense
from narrowcast.algorithms.federated.dense_uploads import send_tensors
from narrowcast.platform.contracts import LocalCall, Task
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, LocalTerms, LocalUpdates


class Median(WholeModel):
    """x += server_learning_rate * median_u (y_u - x), coordinate by coordinate, over the clients that delivered.

    Differs from the paper: 1. clients may take several local steps, where the paper's send one gradient.
    """

    kind: Literal["median"] = "median"

    def local_call(self, broadcast: Arrays, chunk: Chunk, task: Task) -> LocalCall:
        """Train the whole model."""
        return LocalCall(broadcast, chunk, task, LocalTerms())

    def upload(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> ChunkResult:
        """Hand on every delivered change."""
        del broadcast
        uploads = send_tensors(task, chunk, updates, updates.changes, Codec(self.codec))
        partial = {name: values[uploads.delivered] for name, values in uploads.changes.items()}
        return finish_dense(chunk, updates, uploads, partial)

    def fold(self, partials: Sequence[Arrays]) -> Arrays:
        """All changes, one after the other."""
        return {name: np.concatenate([partial[name] for partial in partials]) for name in partials[0]}

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays) -> Arrays:
        """Add the median change; nothing changes where nobody delivered."""
        del broadcast
        rate = self.server_learning_rate
        return {
            name: np.asarray(values) + rate * np.median(total[name], axis=0) if len(total[name]) else values
            for name, values in server.items()
        }
