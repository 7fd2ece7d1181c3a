"""Fair averaging: q-FFL and AFL, whose clients send their loss with their change.

q-FFL: clients with larger losses have larger weights, so that accuracies are more even across clients.

Reference: Li et al., Fair Resource Allocation in Federated Learning, ICLR 2020 (arXiv:1905.10497), Algorithms 1
(q-FedSGD) and 2 (q-FedAvg). Letters: x the server's model, y_u client u's, F_u its mean loss at x, L a bound on the
Lipschitz constant of the gradients.

AFL: the mixture of the clients' losses that is worst for the model is minimised.

Reference: Mohri et al., Agnostic Federated Learning, ICML 2019 (arXiv:1902.00146), Stochastic-AFL. Letters: x the
server's model, y_u client u's, F_u its mean loss at x, lambda_u its share of the mixture.

Averaging whose clients send their loss at the server's model with their change.

One number that a client sends with its tensors, such as its loss or its number of local steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.client.sums import SumLayout, TensorSum, Weights, refuse_weights, tensor_weights
from narrowcast.algorithms.client.uploads import (
    TensorCoding,
    Tensors,
    Uploads,
    chunk_result,
    send_tensors,
    tensor_coding,
)
from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.wire import dtype_of
from narrowcast.algorithms.federated.fedavg import Averaging, model_of
from narrowcast.algorithms.federated.server_optimizer import SERVER_ONLY
from narrowcast.algorithms.local_training.local_optimizer import only_gradient_descent
from narrowcast.platform.contracts import Broadcast, Task, Traits
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, FloatArray, IntArray, LocalTerms, LocalUpdates

NUMBER_BITS = 32
"""The size of a count, or of a float32."""


def bits_of_number(like: Arrays) -> int:
    """Return the size of a number that is sent in the type of these tensors."""
    return 8 * dtype_of(like).itemsize


def with_number(bits: IntArray, number_bits: int = NUMBER_BITS) -> IntArray:
    """Return the sizes of uploads with the number, [C]; clients that send nothing send no number either."""
    return np.where(bits > 0, bits + number_bits, 0)


def send_with_number(
    chunk: Chunk, task: Task, updates: LocalUpdates, coding: TensorCoding, number_bits: int = NUMBER_BITS
) -> tuple[Tensors, Uploads]:
    """Send each client's changes, as `send_tensors` does, and its number, which is part of the size."""
    received, uploads = send_tensors(chunk.reserve_bits(number_bits), task, updates, coding)
    return received, replace(uploads, bits=with_number(uploads.bits, number_bits))


class LossReporting(Averaging):
    """Clients compute their mean loss over their training set before they train, and send it: 32 bits, or 64."""

    aggregator: None = Field(None, description="none: losses weight the changes")

    def check(self, task: Task) -> None:
        """Raise `UserError` if the local training does not compute that loss."""
        super().check(task)
        if not task.training.traits.computes_start_loss:
            raise UserError(
                f"the algorithm needs clients' loss before training, which training.kind = {task.training.kind} does "
                "not compute; use another algorithm, or a neural network"
            )

    def sum_layout(self, task: Task, cohort: int) -> SumLayout | None:
        """Return None: the server needs the loss of each client."""
        del task, cohort
        return None

    def terms(self, chunk: Chunk, task: Task) -> LocalTerms:
        """Return plain SGD, and the loss that it starts from."""
        del chunk, task
        return LocalTerms(start_loss=True)

    def upload_bits(self, broadcast: Arrays, task: Task, clients: IntArray) -> IntArray | None:
        """Return the size of each client's upload, [C], with its loss; None with a codec."""
        bits = super().upload_bits(broadcast, task, clients)
        return None if bits is None else with_number(bits, bits_of_number(model_of(broadcast)))

    def send_with_loss(self, chunk: Chunk, task: Task, updates: LocalUpdates) -> tuple[Tensors, Uploads]:
        """Send each client's changes, and its loss, which is part of the size."""
        coding, loss_bits = tensor_coding(Codec(self.codec)), bits_of_number(updates.changes)
        return send_with_number(chunk, task, updates, coding, loss_bits)


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


_MIXTURE = SERVER_ONLY.name("mixture")
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
        """Return None: lambda refers to the current model, so stale losses cannot be used."""
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
