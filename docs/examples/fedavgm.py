"""FedAvgM: FedAvg with momentum on the server.

Reference: Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019 (arXiv:1909.06335), section 4: v becomes momentum v + mean change, and the model moves by v.
"""

from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.extend import SERVER_ONLY, Arrays, Averaging, PrefixedArrays, Task

VELOCITY = PrefixedArrays(SERVER_ONLY.name("velocity/"))
"""Names of the velocity in the server's state; those of `SERVER_ONLY` are not sent, and are not part of the model."""


class FedAvgM(Averaging):
    """FedAvg whose server keeps a velocity beside the model; `momentum: 0` is FedAvg."""

    kind: Literal["fedavgm"] = "fedavgm"
    momentum: float = Field(0.9, ge=0, lt=1)

    def init(self, task: Task) -> Arrays:
        """Return the model, and a velocity of zero."""
        zeros = {name: np.zeros_like(values) for name, values in self.parameters(task).items()}
        return {**super().init(task), **VELOCITY.add(zeros)}

    def moved(self, server: Arrays, broadcast: Arrays, changes: Arrays) -> Arrays:
        """Add the mean change to the velocity, and the velocity to the model."""
        velocity = {name: self.momentum * values + changes[name] for name, values in VELOCITY.of(server).items()}
        return {**super().moved(server, broadcast, velocity), **VELOCITY.add(velocity)}

    def weighted_by_staleness(self, partial: Arrays, factor: float) -> None:
        """Return None: the velocity does not scale with an update's age."""
