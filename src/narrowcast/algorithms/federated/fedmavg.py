"""FedMAvg: model averaging for federated matrix factorisation, in which every client trains and few send.

Reference: Wang, Suwandi and Chang, Demystifying Model Averaging for Communication-Efficient Federated Matrix
Factorization, ICASSP 2021, Algorithm 1. Letters: X = [X_1 .. X_P] the columns of the clients, W the server's factors,
H_p those of client p, omega_p its weight, m the number of draws of senders.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.federated.factor_averaging import FactorAveraging
from narrowcast.algorithms.federated.sum_layout import SumLayout
from narrowcast.algorithms.uploads.partial_sums import TensorSum
from narrowcast.platform.contracts import Task, Traits
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.masked_factorisation import ROW_FACTORS
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays, Chunk, FloatArray


class FedMAvg(FactorAveraging):
    """Model averaging for matrix factorisation: every client trains its own columns, and only those drawn send W.

    A round is Q1 projected gradient steps on H_p and then steps on W_p, on every client of the cohort; see
    `training.kind: alternating_gradient`. With `senders` m, m clients are drawn with replacement with probabilities
    omega_p from the public seed, and W becomes the projection of the mean of the W_p drawn. Without it every client
    sends, and W becomes that of sum omega_p W_p / sum omega_p.

    A client that is not drawn advances its H_p; its steps on W_p would be thrown away, and are not taken. Draws are
    among all clients: let `clients_per_round` be their number, or part of those drawn are not there.
    """

    kind: Literal["fedmavg"] = "fedmavg"
    senders: int | None = Field(
        None, ge=1, description="m, draws with replacement of the clients that send; null: all clients of the round"
    )
    weights: Literal["columns", "examples", "equal"] = Field(
        "columns", description="omega_p, in proportion to a client's columns or training entries, or the same for all"
    )

    def check(self, task: Task) -> None:
        """Raise `UserError` for another model or training, and for a rank above the size of the matrix."""
        super().check(task)
        data, rank = task.data, task.model.rank  # type: ignore[attr-defined]
        if rank > min(data.n_users, data.n_items):
            raise UserError(
                f"model.rank = {rank}: {data.name} has {data.n_items} rows and {data.n_users} columns; use at most "
                f"{min(data.n_users, data.n_items)}"
            )

    @property
    def traits(self) -> Traits:
        """One that is drawn k times has k times its weight, if every client of the round sends."""
        return replace(super().traits, counts_draws=self.senders is None)

    def sending_weights(self, chunk: Chunk, task: Task) -> FloatArray:
        """Return the weights of the chunk's clients in the mean, [C]; 0 for one that does not send."""
        omega = self._omega(task)
        if self.senders is None:
            draws = 1 if chunk.draws is None else chunk.draws
            return np.asarray(omega[chunk.clients] * draws)
        random = generator(task.seed, "senders", chunk.round_index)
        drawn = random.choice(len(omega), self.senders, p=omega / omega.sum())
        return np.bincount(drawn, minlength=len(omega))[chunk.clients].astype(np.float64)

    def moved(self, row_factors: Arrays, total: TensorSum) -> Arrays:
        """Return W plus the mean change."""
        return {ROW_FACTORS: row_factors[ROW_FACTORS] + total.mean(ROW_FACTORS)}

    def sum_layout(self, task: Task, cohort: int) -> SumLayout | None:
        """Return the layout of the sum of W's changes; raise `UserError` for draws of senders."""
        if self.senders is not None:
            raise UserError(
                "secure: algorithm.senders draws few of the clients that agreed on a sum; leave out algorithm.senders "
                "and use a smaller clients_per_round"
            )
        return self.layout_of(task, cohort, int(np.sort(self._omega(task))[-cohort:].sum()))

    def _omega(self, task: Task) -> FloatArray:
        trains = task.data.examples > 0
        match self.weights:
            case "columns":
                omega = task.data.of_clients.n_columns
            case "examples":
                omega = task.data.examples
            case _:
                omega = np.ones(task.data.n_clients)
        return np.asarray(omega * trains, dtype=np.float64)
