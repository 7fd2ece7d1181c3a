"""Averaging whose clients send their loss at the server's model with their change."""

from __future__ import annotations

from pydantic import Field

from narrowcast.algorithms.federated.fedavg import Averaging
from narrowcast.algorithms.federated.sum_layout import SumLayout
from narrowcast.algorithms.uploads.number_upload import with_number
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Arrays, Chunk, IntArray, LocalTerms


class LossReporting(Averaging):
    """Clients compute their mean loss over their training set before they train, and send it: 32 bits."""

    aggregator: None = Field(None, description="none: losses weight the changes")

    def check(self, task: Task) -> None:
        """Raise `UserError` if the local training does not compute that loss."""
        super().check(task)
        if not getattr(task.training, "computes_start_loss", False):
            raise UserError(
                f"the algorithm needs clients' loss before training, which training.kind = {task.training.kind} does "
                "not compute; use another algorithm, or a neural network"
            )

    def sum_layout(self, task: Task, cohort: int) -> SumLayout | None:
        """Return None: the server needs the loss of each client."""
        del task, cohort
        return None

    def terms(self, chunk: Chunk, task: Task) -> LocalTerms:
        """Return plain SGD, and the loss that it starts from."""
        del chunk, task
        return LocalTerms(start_loss=True)

    def upload_bits(self, broadcast: Arrays, task: Task, clients: IntArray) -> IntArray | None:
        """Return the size of each client's upload, [C], with its loss; None with a codec."""
        bits = super().upload_bits(broadcast, task, clients)
        return None if bits is None else with_number(bits)
