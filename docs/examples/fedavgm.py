"""FedAvgM: FedAvg with momentum on the server.

Reference: Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019 (arXiv:1909.06335), section 4: v becomes momentum v + mean change, and the model moves by v.
"""

from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.federated.fedavg import Averaging
from narrowcast.platform.contracts import Broadcast, Task
from narrowcast.platform.types import Arrays

VELOCITY = "velocity/"


class FedAvgM(Averaging):
    """FedAvg whose server keeps a velocity beside the model; `momentum: 0` is FedAvg."""

    kind: Literal["fedavgm"] = "fedavgm"
    momentum: float = Field(0.9, ge=0, lt=1)

    def init(self, task: Task) -> Arrays:
        """Return the model, and a velocity of zero."""
        model = super().init(task)
        return {**model, **{VELOCITY + name: np.zeros_like(values) for name, values in model.items()}}

    def init_clients(self, task: Task) -> Arrays:
        """Return what the model keeps on the clients; the velocity stays on the server."""
        return Averaging(codec=self.codec).init_clients(task)

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Send the model alone."""
        return super().broadcast(self.final(server), task, round_index)

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Add the mean change to the velocity, and the velocity to the model."""
        model = self.final(server)
        moved = super().step(model, broadcast, total, task, round_index)
        velocity = {
            name: self.momentum * server[VELOCITY + name] + moved[name] - values for name, values in model.items()
        }
        return {
            **{name: values + velocity[name] for name, values in model.items()},
            **{VELOCITY + name: values for name, values in velocity.items()},
        }

    def final(self, server: Arrays) -> Arrays:
        """Return the model without the velocity."""
        return {name: values for name, values in server.items() if not name.startswith(VELOCITY)}

    def weighted_by_staleness(self, partial: Arrays, factor: float) -> None:
        """Return None: the velocity does not scale with an update's age."""
