"""FedAvg: clients train the whole model and the server adds the weighted mean of their changes.

Reference: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
Algorithm 1. Letters: x the server's model, y_u client u's after its local steps, n_u its examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.federated.coded_download import DOWNLOAD, Download, SizesDownloads
from narrowcast.algorithms.federated.sum_layout import Group, Part, SumLayout, largest_weight
from narrowcast.algorithms.federated.whole_model import WholeModel, broadcast_all
from narrowcast.algorithms.uploads.client_loop import chunk_result
from narrowcast.algorithms.uploads.partial_sums import TENSORS, WEIGHT, TensorSum, Weights, add_up, tensor_weights
from narrowcast.algorithms.uploads.tensor_uploads import send_tensors, tensor_coding
from narrowcast.platform.contracts import Broadcast, LocalCall, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, LocalTerms, LocalUpdates


class Averaging(SizesDownloads, WholeModel):
    """x += server_learning_rate * sum w_u (y_u - x) / sum w_u over the clients that delivered; w_u is n_u, or 1.

    FedAvg, FedProx and FedPara differ in the terms of their local steps, and in what x holds.
    """

    weights: Weights = "examples"
    download: Download = None

    def check(self, task: Task) -> None:
        """Raise `UserError` if clients are to ask for rows, which networks have not."""
        super().check(task)
        if self.download is not None and self.download.rows == "touched":
            raise UserError(
                "algorithm.download.rows = touched asks for rows of an item matrix; use download.rows = all"
            )

    def init(self, task: Task) -> Arrays:
        """Return x, and what downloads on a grid need."""
        model = self.parameters(task)
        return model if self.download is None else {**model, **self.download.init(model)}

    # Server half

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Send x to every client of the round, or x on a grid."""
        if self.download is None:
            return broadcast_all(server)
        return self.download.broadcast(DOWNLOAD.without(server), server, task, round_index)

    def fold(self, partials: Sequence[Arrays]) -> Arrays:
        """Add up the chunks' sums."""
        return add_up(partials)

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays) -> Arrays:
        """Return x plus the weighted mean of the clients' changes, at the server's learning rate."""
        sums, rate, model = TensorSum.of(total), self.server_learning_rate, DOWNLOAD.without(server)
        held = {} if self.download is None else self.download.kept(model, server, broadcast)
        return {**{name: values + rate * sums.mean(name) for name, values in model.items()}, **held}

    def final(self, server: Arrays) -> Arrays:
        """Return x."""
        return DOWNLOAD.without(server)

    def weighted_by_staleness(self, partial: Arrays, factor: float) -> Arrays:
        """Return a partial sum with its changes times `factor`, and their weight unchanged."""
        tensors = {name: values * factor for name, values in TENSORS.of(partial).items()}
        return {**partial, **TENSORS.add(tensors)}

    def sum_layout(self, task: Task, cohort: int) -> SumLayout:
        """Return one group: all tensors that clients train, and the weight that they are multiplied by."""
        tensors = {TENSORS.name(name): np.asarray(values) for name, values in self.parameters(task).items()}
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {
            name: (values.shape, values.dtype) for name, values in tensors.items()
        }
        shapes[WEIGHT] = ((), np.float64)
        values = tuple(Part(name, None, values.size) for name, values in tensors.items())
        most = largest_weight(task, cohort) if self.weights == "examples" else cohort
        return SumLayout((Group(values, (Part(WEIGHT, None, 1),)),), shapes, most, cohort, one_weight=True)

    # Client half

    def terms(self, chunk: Chunk, task: Task) -> LocalTerms:
        """Return what the algorithm adds to the local steps: nothing, plain SGD."""
        del chunk, task
        return LocalTerms()

    def local_call(self, broadcast: Arrays, chunk: Chunk, task: Task) -> LocalCall:
        """Train the whole model from x."""
        return LocalCall(DOWNLOAD.without(broadcast), chunk, task, self.terms(chunk, task))

    def upload(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> ChunkResult:
        """Send y_u - x, and add up w_u (y_u - x)."""
        del broadcast
        received, uploads = send_tensors(chunk, task, updates, tensor_coding(Codec(self.codec)))
        weight = tensor_weights(self.weights, task, chunk, uploads.delivered)
        return chunk_result(chunk, updates, uploads, TensorSum.weighted(received, weight).arrays())


class FedAvg(Averaging):
    """The weighted mean of the clients' models.

    Differs from the paper: 1. the change is averaged and scaled by `server_learning_rate`; 1 gives the paper's mean of
    models.
    """

    kind: Literal["fedavg"] = "fedavg"
