"""FedDyn: local losses with a linear and a quadratic term that change with the rounds, so that local minima agree.

Reference: Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021 (arXiv:2111.04263), Algorithm 1.
Letters: x the server's model, y_u client u's, g_u the gradient of its loss at its last model, h the mean of all g_u.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.client.client_pass import Arrived, Contribution
from narrowcast.algorithms.client.sums import TensorSum, Weights, refuse_weights
from narrowcast.algorithms.client.uploads import CONTROL, where_client, zeros_of_clients
from narrowcast.algorithms.federated.fedavg import Averaging, model_of
from narrowcast.algorithms.federated.server_optimizer import SERVER_ONLY
from narrowcast.platform.contracts import Task
from narrowcast.platform.traits import Traits
from narrowcast.platform.types import Arrays, Chunk, LocalTerms, PrefixedArrays

_H = PrefixedArrays(SERVER_ONLY.name("h/"))


class FedDyn(Averaging):
    """Local losses with a linear and a quadratic term that make local minima agree with the global one.

    Clients descend F_u(y) - <g_u, y> + alpha/2 |y - x|^2 and set g_u -= alpha (y_u - x).

    The server sets h -= alpha / U * sum (y_u - x) over the clients that delivered, and x = mean y_u - h / alpha. A
    client sends and receives what FedAvg's does; g_u stays on the client and h on the server.

    Differs from the paper: 1. local SGD for the given epochs in place of a minimiser, as in the authors' code. 2. all
    clients have the same alpha; the authors' code divides it by a client's share of the examples. 3. g_u moves by what
    the server decodes of the client's change, and a client whose upload is lost keeps its g_u, so that h stays the mean
    of all g_u. 4. `server_learning_rate` scales the mean change.
    """

    kind: Literal["feddyn"] = "feddyn"
    alpha: float = Field(0.01, gt=0, description="weight of the quadratic term")
    weights: Weights = "equal"
    server_optimizer: None = Field(None, description="none: h is the memory of the server's step")
    aggregator: None = Field(None, description="none: h follows the mean change")

    @property
    def traits(self) -> Traits:
        """A client counts once: h is the mean of all g_u, which move once a round."""
        return replace(super().traits, counts_draws=False)

    def check(self, task: Task) -> None:
        """Raise `UserError` for other weights than those of the paper."""
        super().check(task)
        refuse_weights(self.kind, self.weights)

    def init(self, task: Task) -> Arrays:
        """Return x, and h = 0."""
        server = super().init(task)
        zeros = {name: np.zeros_like(values) for name, values in model_of(server).items()}
        return {**server, **_H.add(zeros)}

    def init_clients(self, task: Task) -> Arrays:
        """Return the clients' private parameters, g_u = 0, and the codec's state."""
        gradients = zeros_of_clients(self.parameters(task), task.data.n_clients)
        return {**super().init_clients(task), **CONTROL.add(gradients)}

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Return the state with the next h, and x = mean y_u - h / alpha."""
        moved = super().step(server, broadcast, total, task, round_index)
        sums, h = TensorSum.of(total), _H.of(server)
        if not sums.weight:
            return moved
        scale = self.alpha * float(sums.weight) / task.data.n_clients
        h = {name: _like(values, values - scale * sums.mean(name)) for name, values in h.items()}
        return {
            **moved,
            **{name: _like(correction, moved[name] - correction / self.alpha) for name, correction in h.items()},
            **_H.add(h),
        }

    def weighted_by_staleness(self, partial: Arrays, factor: float) -> None:
        """Return None: h would no longer be the mean of the clients' g_u."""
        del partial, factor

    def terms(self, chunk: Chunk, task: Task) -> LocalTerms:
        """Return the linear and the quadratic term."""
        del task
        return LocalTerms(self.alpha, {name: -values for name, values in CONTROL.of(chunk.state).items()})

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return y_u - x, and g_u moved by it as the server decodes it."""
        moved = {
            name: where_client(arrived.delivered, _like(before, before - self.alpha * arrived.tensors[name]), before)
            for name, before in CONTROL.of(chunk.state).items()
        }
        return replace(super().contribution(broadcast, chunk, task, arrived), state=CONTROL.add(moved))


def _like(before: Any, values: Any) -> Any:
    """Return values in the precision that the array had before."""
    return np.asarray(values, dtype=before.dtype)
