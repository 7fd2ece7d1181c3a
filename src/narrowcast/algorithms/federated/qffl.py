"""q-FFL: clients with larger losses have larger weights, so that accuracies are more even across clients.

Reference: Li et al., Fair Resource Allocation in Federated Learning, ICLR 2020 (arXiv:1905.10497), Algorithms 1
(q-FedSGD) and 2 (q-FedAvg). Letters: x the server's model, y_u client u's, F_u its mean loss at x, L a bound on the
Lipschitz constant of the gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.federated.loss_reporting import LossReporting
from narrowcast.algorithms.local_training.local_optimizer import only_gradient_descent
from narrowcast.algorithms.uploads.client_loop import chunk_result
from narrowcast.algorithms.uploads.partial_sums import TensorSum, Weights, tensor_weights
from narrowcast.platform.contracts import Task
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, LocalUpdates

_TINY_LOSS = 1e-10  # as in the authors' code: a loss of 0 has a power for q < 1


class QFFL(LossReporting):
    """Clients with larger losses have larger weights, so that accuracies are more even: q-FedSGD and q-FedAvg.

    x += server_learning_rate * sum F_u^q (y_u - x) / sum (F_u^q + q F_u^(q-1) L |y_u - x|^2), L = 1 / learning rate.

    This is q-FedAvg, and q-FedSGD with `training.batch_size: all` and one epoch; q = 0 is FedAvg with equal weights.
    A client sends its loss F_u at x, over its training set and before it trains, with its change: 32 bits.

    Differs from the paper: 1. clients are sampled as the experiment says; the paper samples them by their share of the
    examples (`weights: examples` multiplies by that share instead).
    """

    kind: Literal["qffl"] = "qffl"
    q: float = Field(1.0, ge=0, description="fairness: 0 is FedAvg, larger values favour clients with larger losses")
    lipschitz: float | None = Field(
        None, gt=0, description="L; null: 1 / training.learning_rate, as in the paper's experiments"
    )
    weights: Weights = "equal"

    def check(self, task: Task) -> None:
        """Raise `UserError` if L is to be that of gradient descent, and the local steps are others."""
        super().check(task)
        if self.q and self.lipschitz is None:
            only_gradient_descent(
                task,
                "algorithm.lipschitz = null stands for 1 / training.learning_rate, which bounds steps along gradients",
                "a value of algorithm.lipschitz",
            )

    def upload(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> ChunkResult:
        """Send y_u - x and F_u, and add up the numerator and the denominator of the server's step."""
        del broadcast
        assert updates.start_loss is not None, "terms() has asked for it"
        received, uploads = self.send_with_loss(chunk, task, updates)
        weight = tensor_weights(self.weights, task, chunk, uploads.delivered)
        loss = np.where(uploads.delivered, updates.start_loss, 1.0) + _TINY_LOSS
        bound = self.lipschitz or 1 / updates.mean_rates(task.training.learning_rate)
        squares = sum(np.square(change).reshape(len(loss), -1).sum(axis=1) for change in received.values())
        divisors = loss**self.q
        if self.q:
            divisors = divisors + self.q * loss ** (self.q - 1) * bound * np.where(uploads.delivered, squares, 0)
        total = TensorSum.weighted(received, weight * loss**self.q)
        partial = replace(total, weight=np.array((weight * divisors).sum()))
        return chunk_result(chunk, updates, uploads, partial.arrays())
