"""An attack on averaging: some clients send their change with the sign reversed, and larger.

Reference: Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017 (arXiv:1703.02757); `aggregator: krum` is
their answer.
"""

from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.extend import Arrays, Averaging, Chunk, LocalUpdates, Task, scaled


class SignFlip(Averaging):
    """FedAvg in which the first `attackers` clients send -`scale` times their change."""

    kind: Literal["sign_flip"] = "sign_flip"
    attackers: int = Field(1, ge=0)
    scale: float = Field(3.0, gt=0)

    def tamper(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> LocalUpdates:
        """Return the changes, of attackers their opposite."""
        factor = np.where(chunk.clients < self.attackers, -self.scale, 1.0)
        return replace(updates, changes=scaled(updates.changes, factor))
