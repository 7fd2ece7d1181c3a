"""DP-FedAvg: changes of bounded norm, and Gaussian noise on their sum.

Reference: McMahan, Ramage, Talwar and Zhang, Learning Differentially Private Recurrent Language Models, ICLR 2018
(arXiv:1710.06963), Algorithm 1; its clients are drawn by `sampling: poisson`.
"""

from dataclasses import replace
from typing import Literal

from narrowcast.extend import Arrays, Averaging, Chunk, LocalUpdates, Message, Privacy, Task


class DPFedAvg(Averaging):
    """FedAvg with equal weights, a clip, and noise."""

    kind: Literal["dp_fedavg"] = "dp_fedavg"
    weights: Literal["equal"] = "equal"
    aggregator: None = None
    privacy: Privacy = Privacy()

    def message(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> Message:
        """Send the change, scaled down to the norm `privacy.clip`."""
        plain = super().message(broadcast, chunk, task, updates)
        return replace(plain, tensors=self.privacy.clipped(plain.tensors))

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Step along the mean of the noisy sum."""
        return super().step(server, broadcast, self.privacy.noisy(total, task, round_index), task, round_index)

    def weighted_by_staleness(self, partial: Arrays, factor: float) -> None:
        """Return None: a stale change is no smaller than its clip."""
