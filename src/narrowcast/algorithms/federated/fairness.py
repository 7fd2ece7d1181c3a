"""Fair averaging: q-FFL and AFL, whose clients send their loss at the server's model with their change.

Letters: x the server's model, y_u client u's after its local steps, F_u client u's mean loss at x.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.client.client_pass import Arrived, Contribution
from narrowcast.algorithms.client.sums import EACH, SumLayout, Weights, refuse_weights, tensor_weights
from narrowcast.algorithms.client.uploads import Message, bits_of_number, with_bits
from narrowcast.algorithms.federated.fedavg import Averaging, model_of
from narrowcast.algorithms.federated.server_optimizer import SERVER_ONLY
from narrowcast.algorithms.local_training.rules import only_gradient_descent
from narrowcast.platform.contracts import Broadcast, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.traits import Traits
from narrowcast.platform.types import Arrays, Chunk, FloatArray, IntArray, LocalTerms, LocalUpdates

_LOSS = "loss"


class LossReporting(Averaging):
    """Averaging whose clients send their mean loss over their training set, before they train: 32 or 64 bits."""

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
        return None if bits is None else with_bits(bits, bits_of_number(np.empty(0), model_of(broadcast)))

    def message(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> Message:
        """Send y_u - x and F_u."""
        assert updates.start_loss is not None, "terms() has asked for it"
        return replace(super().message(broadcast, chunk, task, updates), numbers={_LOSS: updates.start_loss})


_TINY_LOSS = 1e-10  # as in the authors' code: a loss of 0 has a power for q < 1


class QFFL(LossReporting):
    """Clients with larger losses have larger weights, so that accuracies are more even: q-FedSGD and q-FedAvg.

    x += server_learning_rate * sum F_u^q (y_u - x) / sum (F_u^q + q F_u^(q-1) L |y_u - x|^2), L = 1 / learning rate,
    which bounds the Lipschitz constant of the gradients.

    This is q-FedAvg, and q-FedSGD with `training.batch_size: all` and one epoch; q = 0 is FedAvg with equal weights.
    A client sends its loss F_u at x, over its training set and before it trains, with its change: 32 bits.

    Differs from the paper: 1. clients are sampled as the experiment says; the paper samples them by their share of the
    examples (`weights: examples` multiplies by that share instead).

    Reference: Li et al., Fair Resource Allocation in Federated Learning, ICLR 2020 (arXiv:1905.10497), Algorithms 1
    (q-FedSGD) and 2 (q-FedAvg).
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

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return the numerator and the denominator of the server's step."""
        del broadcast
        weight = tensor_weights(self.weights, task, chunk)
        loss = np.where(arrived.delivered, arrived.numbers[_LOSS], 1.0) + _TINY_LOSS
        bound = self.lipschitz or 1 / arrived.updates.mean_rates(task.training.learning_rate)
        squares = sum(np.square(change).reshape(len(loss), -1).sum(axis=1) for change in arrived.tensors.values())
        divisors = loss**self.q
        if self.q:
            divisors = divisors + self.q * loss ** (self.q - 1) * bound * np.where(arrived.delivered, squares, 0)
        return Contribution(arrived.tensors, weight * loss**self.q, divisor=weight * divisors)


_MIXTURE = SERVER_ONLY.name("mixture")
_CLIENTS, _LOSSES = "clients", "losses"


class AFL(LossReporting):
    """The loss of the mixture of the clients that is worst for the model is minimised.

    lambda_u is client u's share of the mixture.

    x += server_learning_rate * sum lambda_u (y_u - x) / sum lambda_u; lambda moves up the clients' losses.

    lambda begins as the clients' shares of the examples, moves by `mixture_learning_rate` F_u, and is projected onto
    the probability simplex. The server multiplies each change by its lambda_u, so that no client is sent it. A client
    sends its loss F_u at x, over its training set and before it trains, with its change: 32 bits.

    Differs from the paper: 1. a client may take several local steps; the paper's sends one stochastic gradient. 2. all
    clients take part in the paper's rounds; here lambda moves for those that delivered, and the sum is divided by
    theirs. 3. the last model is returned and not the mean over the rounds.

    Reference: Mohri et al., Agnostic Federated Learning, ICML 2019 (arXiv:1902.00146), Stochastic-AFL.
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

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Return x after the server's step along the mixture's mean change, and the next lambda."""
        reports, moved = EACH.of(total), super().step(server, broadcast, total, task, round_index)
        if not len(reports[_CLIENTS]):
            return moved
        mixture = np.array(server[_MIXTURE])
        mixture[reports[_CLIENTS]] += self.mixture_learning_rate * reports[_LOSSES]
        return {**moved, _MIXTURE: on_simplex(mixture)}

    def weighted_by_staleness(self, partial: Arrays, factor: float) -> None:
        """Return None: lambda refers to the current model, so stale losses cannot be used."""
        del partial, factor

    # Client half

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return lambda_u (y_u - x), and F_u of each client."""
        del task
        weight = np.asarray(broadcast[_MIXTURE])[chunk.clients]
        return Contribution(arrived.tensors, weight, each={_CLIENTS: chunk.clients, _LOSSES: arrived.numbers[_LOSS]})


def on_simplex(values: FloatArray) -> FloatArray:
    """Return the nearest point of the probability simplex, [U].

    Reference: Duchi et al., Efficient Projections onto the l1-Ball, ICML 2008, Figure 1.
    """
    descending = np.sort(values)[::-1]
    excess = (np.cumsum(descending) - 1) / np.arange(1, len(values) + 1)
    return np.maximum(values - excess[descending > excess][-1], 0.0)
