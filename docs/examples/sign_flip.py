"""An attack on averaging: some clients send their change with the sign reversed, and larger.

`SignFlip` attacks FedAvg, `SignFlipRows` the item rows of SCoLR.

Reference: Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017 (arXiv:1703.02757); `aggregator: krum` is
their answer.
"""

from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.extend import Arrays, Averaging, Chunk, ClientPass, LocalUpdates, SCoLR, Task


class Attacked(ClientPass):
    """A method of which the first `attackers` clients send -`scale` times their change."""

    attackers: int = Field(1, ge=0)
    scale: float = Field(3.0, gt=0)

    def tamper(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> LocalUpdates:
        """Return the changes, of attackers their opposite."""
        return updates.scaled(np.where(chunk.clients < self.attackers, -self.scale, 1.0))


class SignFlip(Attacked, Averaging):
    """FedAvg with attackers."""

    kind: Literal["sign_flip"] = "sign_flip"


class SignFlipRows(Attacked, SCoLR):
    """SCoLR with attackers."""

    kind: Literal["sign_flip_rows"] = "sign_flip_rows"  # type: ignore[assignment]
