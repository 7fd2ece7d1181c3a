"""The subspace in which CoLR and SCoLR train the change of the item factors."""

from __future__ import annotations

from dataclasses import dataclass

from narrowcast.algorithms.local_training.logistic import Floats
from narrowcast.platform.types import BoolArray


@dataclass(frozen=True)
class Subspace:
    """The basis B of an update A B and the components of A that each client trains.

    Shapes: basis [r, d], r = 0 where whole rows are trained; components [C, r], with the clients in the order of the
    samples or batches they are trained on.
    """

    basis: Floats
    components: BoolArray

    @property
    def gradient_scale(self) -> float:
        """Return sqrt(r / d), which scales the gradient of A (Nguyen et al., WWW 2024, section 5.1)."""
        return float((self.basis.shape[0] / self.basis.shape[1]) ** 0.5)
