"""DP-FedAvg: changes of bounded norm, and Gaussian noise on their sum.

Reference: McMahan, Ramage, Talwar and Zhang, Learning Differentially Private Recurrent Language Models, ICLR 2018
(arXiv:1710.06963), Algorithm 1 with flat clipping. The noise is simulated: it follows from the run's public seed.
"""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
from pydantic import Field

from narrowcast.extend import Arrays, Averaging, Chunk, LocalUpdates, Message, Task, generator


class DPFedAvg(Averaging):
    """FedAvg with equal weights; a change has a norm of at most `clip`, the sum noise of standard deviation z clip."""

    kind: Literal["dp_fedavg"] = "dp_fedavg"
    weights: Literal["equal"] = "equal"
    aggregator: None = None
    clip: float = Field(1.0, gt=0)
    z: float = Field(1.0, ge=0, description="noise multiplier")

    def message(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> Message:
        """Send the change, scaled down to the norm `clip`."""
        plain = super().message(broadcast, chunk, task, updates)
        squares = sum(np.square(values).reshape(len(values), -1).sum(axis=1) for values in plain.tensors.values())
        scale = np.minimum(1, self.clip / np.maximum(np.sqrt(squares), 1e-12))
        return replace(plain, tensors={name: scaled(values, scale) for name, values in plain.tensors.items()})

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Step along the mean of the noisy sum."""
        noisy: dict[str, Any] = dict(total)
        for name in sorted(name for name in total if name.startswith("sum/")):
            noise = generator(task.seed, f"privacy {name}", round_index).standard_normal(total[name].shape)
            noisy[name] = (total[name] + self.z * self.clip * noise).astype(total[name].dtype)
        return super().step(server, broadcast, noisy, task, round_index)

    def weighted_by_staleness(self, partial: Arrays, factor: float) -> None:
        """Return None: a stale change is no smaller than its clip."""


def scaled(values: Any, scale: Any) -> Any:
    """Return values [C, ...] times one factor [C] of each client."""
    return values * scale.reshape(-1, *[1] * (values.ndim - 1)).astype(values.dtype)
