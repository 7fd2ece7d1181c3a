"""SCAFFOLD: local steps corrected by control variates, one on every client and one on the server.

Reference: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020
(arXiv:1910.06378), Algorithm 1. Letters: x the server's model, y a client's, c and c_u the control variates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.federated.codec_state import init_codec_state
from narrowcast.algorithms.federated.dense_updates import (
    SUM,
    WEIGHT,
    LocalThenUpload,
    broadcast_dense,
    client_weights,
    finish_dense,
    float_bits,
    of_clients,
    weighted_mean,
    weighted_sum,
)
from narrowcast.algorithms.federated.dense_uploads import send_tensors
from narrowcast.algorithms.federated.sums import add_up
from narrowcast.platform.contracts import Broadcast, LocalCall, Task
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, IntArray, LocalTerms, LocalUpdates

_CONTROL = "control/"


class Scaffold(LocalThenUpload):
    """y -= lr (g(y) - c_u + c); c_u becomes c_u - c + (x - y) / (K lr), option II; x and c move by the mean changes.

    A client sends the changes of y and of c_u, and receives x and c: twice FedAvg's bits each way, all counted. A codec
    sees both changes, and c_u moves by what the server decodes of its own, so that c stays the mean of all c_u.

    Differs from the paper: 1. the learning rate in c_u is the local training's; with momentum, weight decay or clipping
    the control variate is that of the whole local step. 2. a client whose upload is lost, or not sent, keeps its c_u:
    it is taken to hear of the loss, or c would be off by it for good.
    """

    kind: Literal["scaffold"] = "scaffold"
    server_learning_rate: float = Field(1.0, gt=0)

    def check(self, task: Task) -> None:
        """Every model fits."""

    def init(self, task: Task) -> Arrays:
        """The model's parameters, and c = 0."""
        model = task.model.init_server(task.data, task.seed)
        return {**model, **{_CONTROL + name: np.zeros_like(values) for name, values in model.items()}}

    def init_clients(self, task: Task) -> Arrays:
        """What the model and the codec keep on the clients, and c_u = 0."""
        server = self.init(task)
        controls = {
            name: np.broadcast_to(np.zeros((), values.dtype), (task.data.n_clients, *values.shape))
            for name, values in server.items()
            if name.startswith(_CONTROL)
        }
        shapes = {name: values.shape for name, values in server.items()}
        codec = init_codec_state(Codec(self.codec), task.data.n_clients, shapes)
        return {**task.model.init_clients(task.data, task.seed), **controls, **codec}

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """The model x and the control variate c."""
        del task, round_index
        return broadcast_dense(server, server)

    def upload_bits(self, broadcast: Arrays, task: Task, clients: IntArray) -> IntArray | None:
        """As much as is broadcast: the changes of x and of c."""
        return float_bits(self.codec, broadcast, task, clients)

    def local_call(self, broadcast: Arrays, chunk: Chunk, task: Task) -> LocalCall:
        """Train with corrected steps."""
        model = self.final(broadcast)
        corrections = {name: broadcast[_CONTROL + name] - chunk.state[_CONTROL + name] for name in model}
        return LocalCall(model, chunk, task, LocalTerms(correction=corrections))

    def upload(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> ChunkResult:
        """Renew the control variates, and add up what changed."""
        travelled = np.maximum(updates.steps, 1) * task.training.learning_rate
        control_changes = {
            _CONTROL + name: -broadcast[_CONTROL + name] - (change.T / travelled.astype(change.dtype)).T
            for name, change in updates.changes.items()
        }
        uploads = send_tensors(task, chunk, updates, {**updates.changes, **control_changes}, Codec(self.codec))
        received = uploads.changes
        weight = client_weights("equal", task, chunk, uploads.delivered)
        partial = {
            **weighted_sum({name: received[name] for name in updates.changes}, weight),
            **weighted_sum({name: received[name] for name in control_changes}, weight / task.data.n_clients),
            WEIGHT: np.array(weight.sum()),
        }
        controls = {
            name: of_clients(uploads.delivered, chunk.state[name] + received[name], chunk.state[name])
            for name in control_changes
        }
        return finish_dense(chunk, updates, uploads, partial, state=controls)

    def fold(self, partials: Sequence[Arrays]) -> Arrays:
        """The sum over all chunks."""
        return add_up(partials)

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays) -> Arrays:
        """The model moves by the cohort's mean change, c by the mean over all clients of the change of c_u."""
        del broadcast
        rate = self.server_learning_rate
        return {
            name: values + (total[SUM + name] if name.startswith(_CONTROL) else rate * weighted_mean(total, name))
            for name, values in server.items()
        }

    def final(self, server: Arrays) -> Arrays:
        """The model's parameters."""
        return {name: values for name, values in server.items() if not name.startswith(_CONTROL)}
