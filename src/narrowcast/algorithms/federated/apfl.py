"""APFL: each client keeps a model of its own and uses its mixture with the global one, which alone is averaged.

Reference: Deng, Kamani and Mahdavi, Adaptive Personalized Federated Learning, 2020 (arXiv:2003.13461), Algorithm 1.
Letters: x the server's model, y_u client u's copy of it, v_u its own model, g the gradient of its loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from narrowcast.algorithms.federated.fedavg import model_of
from narrowcast.algorithms.federated.personal import Personal
from narrowcast.platform.contracts import Task
from narrowcast.platform.types import Arrays, Chunk, Gradient


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


class APFL(Personal):
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

    def rule(self) -> MixedStep | None:
        """Return the steps of y and v; None with alpha = 0, since v is not used."""
        return MixedStep(self.alpha, self.own_gradient == "after") if self.alpha else None

    def personal(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Arrays:
        """Return alpha v_u + (1 - alpha) x, [C, ...]."""
        personal, model = super().personal(broadcast, chunk, task), self.final(model_of(broadcast))
        return {
            name: (self.alpha * personal[name] + (1 - self.alpha) * values).astype(values.dtype)
            for name, values in model.items()
        }
