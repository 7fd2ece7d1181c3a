"""Ditto: each client trains a model of its own beside the global one, and is pulled towards what it was sent.

Reference: Li, Hu, Beirami and Smith, Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021
(arXiv:2012.04221), Algorithm 1. Letters: x the server's model, w what a client was sent of it, y_u its copy, v_u its
own model, g the gradient of its loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from narrowcast.algorithms.federated.personal import Personal
from narrowcast.platform.types import Gradient, PrefixedArrays

_SENT = PrefixedArrays("w/")


@dataclass(frozen=True)
class PulledStep:
    """y -= rate g(y) and v -= rate (g(v) + pull (v - w)), on the same batch."""

    pull: float
    parts: int = 1

    def init(self, start: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return v and w of each client."""
        return {name: own[name].clone() for name in start} | _SENT.add({name: w.clone() for name, w in start.items()})

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
        for name, direction in gradient({name: slots[name] for name in values}, 0).items():
            v = slots[name]
            v.sub_(direction + self.pull * (v - slots[_SENT.name(name)]), alpha=rate)
            values[name].sub_(descent[name], alpha=rate)


class Ditto(Personal):
    """The mean of the y_u moves x as in FedAvg; clients use the v_u, which are measured by `evaluate_clients`.

    v_u never leaves the client: it sends and receives what FedAvg's does, and computes twice as many gradients. `pull`
    0 is training alone; a large one keeps v_u at x, and has to stay below 2 / learning rate. The mean may be any
    aggregate, and go through any codec, download and server optimizer.

    Differs from the paper: 1. y_u and v_u take their steps on the same batches, as in the released code; the paper
    gives v_u steps of its own. 2. v_u begins as the model before round 1. 3. `pull` is the same for all clients; the
    paper may choose it by validation.
    """

    kind: Literal["ditto"] = "ditto"
    pull: float = Field(0.1, ge=0, description="lambda, weight of the squared distance between own and received model")

    def rule(self) -> PulledStep:
        """Return the steps of y and v."""
        return PulledStep(self.pull)
