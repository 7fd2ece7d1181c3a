"""AFL: the mixture of the clients' losses that is worst for the model is minimised.

Reference: Mohri et al., Agnostic Federated Learning, ICML 2019 (arXiv:1902.00146), Stochastic-AFL. Letters: x the
server's model, y_u client u's, F_u its mean loss at x, lambda_u its share of the mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.federated.loss_reporting import LossReporting
from narrowcast.algorithms.federated.server_optimizer import OPTIMIZER
from narrowcast.algorithms.uploads.client_loop import chunk_result
from narrowcast.algorithms.uploads.partial_sums import TensorSum, Weights, refuse_weights
from narrowcast.platform.contracts import Broadcast, Task, Traits
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, FloatArray, LocalUpdates

_MIXTURE = OPTIMIZER.name("mixture")
_LOSSES = "losses"


class AFL(LossReporting):
    """The loss of the worst mixture of the clients is minimised.

    x += server_learning_rate * sum lambda_u (y_u - x) / sum lambda_u; lambda moves up the clients' losses.

    lambda begins as the clients' shares of the examples, moves by `mixture_learning_rate` F_u, and is projected onto
    the probability simplex. The server multiplies each change by its lambda_u, so that no client is sent it. A client
    sends its loss F_u at x, over its training set and before it trains, with its change: 32 bits.

    Differs from the paper: 1. a client may take several local steps; the paper's sends one stochastic gradient. 2. all
    clients take part in the paper's rounds; here lambda moves for those that delivered, and the sum is divided by
    theirs. 3. the last model is returned and not the mean over the rounds.
    """

    kind: Literal["afl"] = "afl"
    mixture_learning_rate: float = Field(0.1, gt=0, description="step size of the mixture lambda")
    weights: Weights = "equal"

    @property
    def traits(self) -> Traits:
        """A client counts once: the mixture weighs the clients."""
        return replace(super().traits, counts_draws=False)

    def check(self, task: Task) -> None:
        """Raise `UserError` for other weights than those of the mixture."""
        super().check(task)
        refuse_weights(self.kind, self.weights)

    def init(self, task: Task) -> Arrays:
        """Return x, and lambda [U]."""
        examples = task.data.examples.astype(np.float64)
        return {**super().init(task), _MIXTURE: examples / examples.sum()}

    # Server half

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Send x to every client; lambda goes with it to where the changes are added up, and to no client."""
        sent = super().broadcast(server, task, round_index)
        return Broadcast({**sent.arrays, _MIXTURE: server[_MIXTURE]}, sent.full, sent.update)

    def fold(self, partials: Sequence[Arrays]) -> Arrays:
        """Add up the chunks' sums, and join the losses of their clients."""
        losses = np.concatenate([partial[_LOSSES] for partial in partials], axis=1)
        sums = [{name: values for name, values in partial.items() if name != _LOSSES} for partial in partials]
        return {**super().fold(sums), _LOSSES: losses}

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Return x after the server's step along the mixture's mean change, and the next lambda."""
        clients, losses = total[_LOSSES]
        moved = super().step(server, broadcast, total, task, round_index)
        if not len(clients):
            return moved
        mixture = np.array(server[_MIXTURE])
        mixture[clients.astype(np.int64)] += self.mixture_learning_rate * losses
        return {**moved, _MIXTURE: on_simplex(mixture)}

    def weighted_by_staleness(self, partial: Arrays, factor: float) -> None:
        """Return None: the mixture is that of the present model."""
        del partial, factor

    # Client half

    def upload(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> ChunkResult:
        """Send y_u - x and F_u, and add up lambda_u (y_u - x)."""
        assert updates.start_loss is not None, "terms() has asked for it"
        received, uploads = self.send_with_loss(chunk, task, updates)
        weight = np.where(uploads.delivered, np.asarray(broadcast[_MIXTURE])[chunk.clients], 0.0)
        losses = np.array([chunk.clients, updates.start_loss])[:, uploads.delivered]
        partial = {**TensorSum.weighted(received, weight).arrays(), _LOSSES: losses}
        return chunk_result(chunk, updates, uploads, partial)


def on_simplex(values: FloatArray) -> FloatArray:
    """Return the nearest point of the probability simplex, [U].

    Reference: Duchi et al., Efficient Projections onto the l1-Ball, ICML 2008, Figure 1.
    """
    descending = np.sort(values)[::-1]
    excess = (np.cumsum(descending) - 1) / np.arange(1, len(values) + 1)
    return np.maximum(values - excess[descending > excess][-1], 0.0)
