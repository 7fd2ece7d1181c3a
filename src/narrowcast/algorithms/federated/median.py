"""The coordinate-wise median of the clients' updates: robust to a minority of arbitrary ones.

Reference: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018
(arXiv:1803.01498), Algorithm 1, option I.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.federated.whole_model import WholeModel
from narrowcast.algorithms.uploads.client_loop import chunk_result
from narrowcast.algorithms.uploads.tensor_uploads import send_tensors, tensor_coding
from narrowcast.platform.contracts import LocalCall, Task
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, LocalTerms, LocalUpdates


class Median(WholeModel):
    """The coordinate-wise median of the clients' changes, robust to a minority of arbitrary ones.

    x += server_learning_rate * median_u (y_u - x), coordinate by coordinate, over the clients that delivered.

    Differs from the paper: 1. clients may take several local steps; the paper's send one gradient.
    """

    kind: Literal["median"] = "median"

    # Server half

    def fold(self, partials: Sequence[Arrays]) -> Arrays:
        """Concatenate the chunks' changes, [C, ...]."""
        return {name: np.concatenate([partial[name] for partial in partials]) for name in partials[0]}

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays) -> Arrays:
        """Return x plus the median change; x if no client delivered."""
        del broadcast
        rate = self.server_learning_rate
        return {
            name: np.asarray(values) + rate * np.median(total[name], axis=0) if len(total[name]) else values
            for name, values in server.items()
        }

    # Client half

    def local_call(self, broadcast: Arrays, chunk: Chunk, task: Task) -> LocalCall:
        """Train the whole model from x."""
        return LocalCall(broadcast, chunk, task, LocalTerms())

    def upload(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> ChunkResult:
        """Send y_u - x; the chunk's part of the aggregate is every delivered change."""
        del broadcast
        received, uploads = send_tensors(chunk, task, updates, tensor_coding(Codec(self.codec)))
        partial = {name: values[uploads.delivered] for name, values in received.items()}
        return chunk_result(chunk, updates, uploads, partial)
