"""Averaging whose clients send their loss at the server's model with their change."""

from __future__ import annotations

from pydantic import Field

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.federated.fedavg import Averaging
from narrowcast.algorithms.federated.sum_layout import SumLayout
from narrowcast.algorithms.federated.whole_model import model_of
from narrowcast.algorithms.uploads.client_loop import Uploads
from narrowcast.algorithms.uploads.number_upload import bits_of_number, send_with_number, with_number
from narrowcast.algorithms.uploads.tensor_uploads import Tensors, tensor_coding
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.kinds import optional
from narrowcast.platform.types import Arrays, Chunk, IntArray, LocalTerms, LocalUpdates


class LossReporting(Averaging):
    """Clients compute their mean loss over their training set before they train, and send it: 32 bits, or 64."""

    aggregator: None = Field(None, description="none: losses weight the changes")

    def check(self, task: Task) -> None:
        """Raise `UserError` if the local training does not compute that loss."""
        super().check(task)
        if not optional(task.training, "computes_start_loss"):
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
        return None if bits is None else with_number(bits, bits_of_number(model_of(broadcast)))

    def send_with_loss(self, chunk: Chunk, task: Task, updates: LocalUpdates) -> tuple[Tensors, Uploads]:
        """Send each client's changes, and its loss, which is part of the size."""
        coding, loss_bits = tensor_coding(Codec(self.codec)), bits_of_number(updates.changes)
        return send_with_number(chunk, task, updates, coding, loss_bits)
