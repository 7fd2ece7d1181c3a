"""FedAvg whose clients are measured after training the global model on samples of their own: a control.

References: Wang et al., Federated Evaluation of On-device Personalization, 2019 (arXiv:1910.10252); Yu, Bagdasaryan and
Shmatikov, Salvaging Federated Learning by Local Adaptation, 2020 (arXiv:2002.04758). Letters: x the server's model.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from narrowcast.algorithms.federated.fedavg import FedAvg, model_of
from narrowcast.algorithms.federated.personal import adapted, check_adapted
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Arrays, Chunk


class FineTune(FedAvg):
    """Rounds are those of FedAvg, bit for bit; `evaluate_clients` measures each client after local epochs from x.

    What a client fine-tunes is measured and forgotten: it costs no bits and no simulated time, and its batches are
    drawn from streams of their own, on training samples alone. The steps are those of `training`, with
    `fine_tune_rate` in place of its learning rate if that is set.
    """

    kind: Literal["fine_tune"] = "fine_tune"  # type: ignore[assignment]
    fine_tune_epochs: int = Field(1, ge=0, description="local epochs from the global model before a client is measured")
    fine_tune_rate: float | None = Field(
        None,
        gt=0,
        description="step size of these epochs, times the factors of training.learning_rate_schedule; null: "
        "training.learning_rate",
    )

    def check(self, task: Task) -> None:
        """Raise `UserError` for what cannot be fine-tuned."""
        super().check(task)
        check_adapted(task, f"algorithm.kind = {self.kind}")
        if self.fine_tune_rate is not None and "learning_rate" not in type(task.training).model_fields:
            raise UserError(
                f"algorithm.fine_tune_rate = {self.fine_tune_rate:g}: training.kind = {task.training.kind} has no "
                "learning rate; leave it out"
            )

    def personal(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Arrays:
        """Return x after each client's epochs, [C, ...]."""
        return adapted(model_of(broadcast), chunk, task, self.fine_tune_epochs, learning_rate=self.fine_tune_rate)
