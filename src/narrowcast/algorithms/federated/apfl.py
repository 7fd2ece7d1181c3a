"""APFL: each client keeps a model of its own and uses its mixture with the global one, which alone is averaged.

Reference: Deng, Kamani and Mahdavi, Adaptive Personalized Federated Learning, 2020 (arXiv:2003.13461), Algorithm 1.
Letters: x the server's model, y_u client u's copy of it, v_u its own model, g the gradient of its loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.client.client_pass import Arrived, Contribution
from narrowcast.algorithms.client.uploads import where_client, zeros_of_clients
from narrowcast.algorithms.federated.fedavg import Averaging, model_of
from narrowcast.algorithms.local_training.local_optimizer import only_gradient_descent
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.neural_network import NeuralNetwork
from narrowcast.platform.types import Arrays, Chunk, Gradient, LocalTerms, PrefixedArrays

_OWN = PrefixedArrays("personal/")
"""v_u less the model before round 1, [U, ...]: zeros until a client takes part."""


@dataclass(frozen=True)
class MixedStep:
    """y -= rate g(y) and v -= rate alpha g(alpha v + (1 - alpha) y) on the same batch: lines 5 to 7.

    Both gradients are taken before either moves, or with `after` that of v once y has moved.
    """

    alpha: float
    after: bool = False
    parts: int = 1

    def init(self, start: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return v of each client."""
        return {name: own[name].clone() for name in start}

    def step(
        self,
        values: Mapping[str, Any],
        slots: Mapping[str, Any],
        gradient: Gradient,
        own: Mapping[str, Any],
        rate: float,
        step: int,
    ) -> None:
        """Move y and v."""
        del own, step
        descent = gradient(values, 0)
        mixed = self._mixed(values, slots)
        for name, direction in descent.items():
            values[name].sub_(direction, alpha=rate)
        if self.after:
            mixed = self._mixed(values, slots)
        for name, direction in gradient(mixed, 0).items():
            slots[name].sub_(direction, alpha=rate * self.alpha)

    def _mixed(self, values: Mapping[str, Any], slots: Mapping[str, Any]) -> dict[str, Any]:
        """Return alpha v + (1 - alpha) y."""
        return {name: self.alpha * slots[name] + (1 - self.alpha) * shared for name, shared in values.items()}


class APFL(Averaging):
    """Clients use alpha v_u + (1 - alpha) x, and the mean of the y_u moves x as in FedAvg.

    v_u never leaves the client: it sends and receives what FedAvg's does, and computes twice as many gradients.
    `evaluate_clients` measures each client's mixture; other evaluations are those of x.

    Differs from the paper: 1. alpha is the same for all clients and rounds; the paper may adapt it by a gradient step.
    2. v_u begins as the model before round 1. 3. a client is measured with x in place of its last y_u. The released
    code (FedTorch) mixes the outputs of two networks, here as in the paper their parameters are mixed; and it moves y_u
    before it takes v_u's gradient, as `own_gradient: after` does.
    """

    kind: Literal["apfl"] = "apfl"
    alpha: float = Field(0.5, ge=0, le=1, description="share of a client's own model in the mixture that it uses")
    own_gradient: Literal["before", "after"] = Field(
        "before",
        description="gradient of a client's own model: at the mixture before the step of y_u on the same batch, as in "
        "the paper, or after it, as in the released code",
    )

    def check(self, task: Task) -> None:
        """Raise `UserError` for models other than networks, whose training takes no steps of an algorithm's own."""
        super().check(task)
        if not isinstance(task.model, NeuralNetwork):
            raise UserError(
                f"algorithm.kind = {self.kind} trains networks, not {task.model.kind}, whose clients keep factors of "
                "their own anyway; use fedmf"
            )
        only_gradient_descent(task, f"algorithm.kind = {self.kind} trains two models by steps along their gradients")
        if momentum := task.training.traits.momentum:
            raise UserError(f"training.momentum = {momentum:g}: the steps of {self.kind} have no momentum; set 0")

    def init_clients(self, task: Task) -> Arrays:
        """Return the clients' private parameters, v_u, and the codec's state."""
        personal = zeros_of_clients(self.parameters(task), task.data.n_clients)
        return {**super().init_clients(task), **_OWN.add(personal)}

    def terms(self, chunk: Chunk, task: Task) -> LocalTerms:
        """Return the steps of y and v; with alpha = 0 plain SGD, since v is not used."""
        if self.alpha == 0:
            return LocalTerms()
        return LocalTerms(rule=MixedStep(self.alpha, self.own_gradient == "after"), own=self._own(chunk, task))

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return y_u - x as FedAvg does, and v_u unless it left the finite numbers."""
        start, personal = task.initial_parameters(), {}
        for name, values in arrived.updates.slots.items():
            finite = np.asarray(np.isfinite(values).reshape(len(values), -1).all(axis=1))
            before = np.asarray(chunk.state[_OWN.name(name)])
            personal[name] = where_client(finite, np.asarray(values) - start[name], before)
        return replace(super().contribution(broadcast, chunk, task, arrived), state=_OWN.add(personal))

    def personal(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Arrays:
        """Return alpha v_u + (1 - alpha) x, [C, ...]."""
        personal, model = self._own(chunk, task), self.final(model_of(broadcast))
        return {
            name: (self.alpha * personal[name] + (1 - self.alpha) * values).astype(values.dtype)
            for name, values in model.items()
        }

    def _own(self, chunk: Chunk, task: Task) -> dict[str, NDArray[Any]]:
        """Return v_u of each client of the chunk, [C, ...]."""
        start = task.initial_parameters()
        return {name: values + start[name] for name, values in _OWN.of(chunk.state).items()}
