"""SCoLR whose clients are measured after training the global model on samples of their own, like fine-tuned FedAvg."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from narrowcast.algorithms.federated.low_rank import SCoLR
from narrowcast.extend import adapted, check_adapted
from narrowcast.platform.contracts import Task
from narrowcast.platform.types import Arrays, Chunk


class FineTunedSCoLR(SCoLR):
    """Rounds are those of SCoLR, bit for bit; `evaluate_clients` measures each client after local epochs from x."""

    kind: Literal["fine_tuned_scolr"] = "fine_tuned_scolr"  # type: ignore[assignment]
    fine_tune_epochs: int = Field(1, ge=0, description="local epochs from the global model before a client is measured")
    fine_tune_rate: float | None = Field(None, gt=0, description="step size of these epochs; null: that of the rounds")

    def check(self, task: Task) -> None:
        """Raise `UserError` for what cannot be fine-tuned."""
        super().check(task)
        check_adapted(task, f"algorithm.kind = {self.kind}")

    def personal(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Arrays:
        """Return x after each client's epochs, [C, ...]."""
        return adapted(self.final(broadcast), chunk, task, self.fine_tune_epochs, learning_rate=self.fine_tune_rate)
