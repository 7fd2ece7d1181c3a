"""Ditto: clients train a model of their own beside the global one, and keep it near.

Reference: Li, Hu, Beirami and Smith, Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021
(arXiv:2012.04221), Algorithm 1. Both models take a step on each batch, as in the released code.
"""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from narrowcast.extend import Personal


@dataclass(frozen=True)
class DittoStep:
    """y -= rate g(y) and v -= rate (g(v) + nearness (v - w)); w is the model that the client was sent."""

    nearness: float
    parts: int = 1

    def init(self, start, own):
        """Return v, and w."""
        return {**{name: own[name].clone() for name in start}, **{f"w/{name}": w.clone() for name, w in start.items()}}

    def step(self, values, slots, gradient, own, rate, step):
        """Move y and v."""
        shared, personal = gradient(values, 0), gradient({name: slots[name] for name in values}, 0)
        for name, v in ((name, slots[name]) for name in values):
            v.sub_(personal[name] + self.nearness * (v - slots[f"w/{name}"]), alpha=rate)
            values[name].sub_(shared[name], alpha=rate)


class Ditto(Personal):
    """FedAvg whose clients use a model of their own; `nearness` 0 is training alone."""

    kind: Literal["own_ditto"] = "own_ditto"
    nearness: float = Field(0.1, ge=0, description="lambda, weight of the squared distance to the global model")

    def rule(self) -> DittoStep:
        """Return the steps of y and v."""
        return DittoStep(self.nearness)
