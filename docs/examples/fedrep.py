"""FedRep: clients share the lower layers of a network, and each keeps a head of its own.

Reference: Collins, Hassani, Mokhtari and Shakkottai, Exploiting Shared Representations for Personalized Federated
Learning, ICML 2021 (arXiv:2102.07078), Algorithm 1: in a round each client first trains its head, then the body.
"""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from narrowcast.extend import LocalTerms, PartlyShared


@dataclass(frozen=True)
class HeadThenBody:
    """Gradient descent that moves the head in the first `head_steps` steps of a round, and the body after them."""

    head: str
    head_steps: int
    parts: int = 1

    def init(self, start, own):
        """Keep nothing."""
        return {}

    def step(self, values, slots, gradient, own, rate, step):
        """Move one of both."""
        for name, direction in gradient(values, 0).items():
            if name.startswith(self.head) == (step < self.head_steps):
                values[name].sub_(direction, alpha=rate)


class FedRep(PartlyShared):
    """Averaging of the body; `evaluate_clients` measures each client's body and head."""

    kind: Literal["fedrep"] = "fedrep"
    head: str = Field("3.", description="beginning of the names of the head's tensors")
    head_steps: int = Field(5, ge=0, description="tau, local steps that train the head")

    def keeps(self, name: str) -> bool:
        """Return whether a tensor is of the head."""
        return name.startswith(self.head)

    def terms(self, chunk, task) -> LocalTerms:
        """Train the head, then the body."""
        return LocalTerms(rule=HeadThenBody(self.head, self.head_steps))
