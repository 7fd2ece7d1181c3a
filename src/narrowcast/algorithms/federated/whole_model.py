"""Common part of algorithms whose clients train by `task.training` alone and then send whole tensors."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import numpy as np
from pydantic import BaseModel, ConfigDict

from narrowcast.algorithms.codecs.dense import DensePayload, dense_wire_bits
from narrowcast.algorithms.codecs.message_header import dtype_of
from narrowcast.algorithms.codecs.stages import Stages
from narrowcast.algorithms.federated.coded_download import DOWNLOAD
from narrowcast.algorithms.federated.server_learning_rate import ServerLearningRate
from narrowcast.algorithms.federated.server_optimizer import OPTIMIZER
from narrowcast.algorithms.uploads.client_loop import init_codec_state
from narrowcast.platform.contracts import Algorithm, Broadcast, LocalCall, Task
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, IntArray, LocalUpdates


class LocalThenUpload(Algorithm, BaseModel, ABC):
    """An algorithm whose client half is local training, then an upload of all values or through a codec."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    codec: Stages = ()

    @abstractmethod
    def local_call(self, broadcast: Arrays, chunk: Chunk, task: Task) -> LocalCall:
        """Return the local training of the chunk's clients."""

    @abstractmethod
    def upload(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> ChunkResult:
        """Return what the clients send and keep of their training."""

    def train(self, broadcast: Arrays, chunk: Chunk, task: Task) -> ChunkResult:
        """Train a chunk of clients, and send what they learnt."""
        call = self.local_call(broadcast, chunk, task)
        updates = task.training.train(call.server, chunk, task, call.terms)
        began = time.perf_counter()
        return self.upload(broadcast, chunk, task, updates).encoded_since(began)


class WholeModel(LocalThenUpload):
    """An algorithm whose server holds the model's parameters and nothing else, and sends them all in every round."""

    server_learning_rate: ServerLearningRate = 1.0

    def init(self, task: Task) -> Arrays:
        """Return the model's parameters."""
        return self.parameters(task)

    def parameters(self, task: Task) -> Arrays:
        """Return what the server's model holds before round 1."""
        return task.initial_parameters()

    def init_clients(self, task: Task) -> Arrays:
        """Return the clients' private parameters, and the codec's state for what they train and send."""
        clients = task.model.init_clients(task.data, task.private_seed.value)
        if not self.codec:
            return clients
        return {**clients, **init_codec_state(self.codec, task.data.n_clients, self.parameters(task))}

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Send the whole model to every client."""
        del task, round_index
        return broadcast_all(server)

    def upload_bits(self, broadcast: Arrays, task: Task, clients: IntArray) -> IntArray | None:
        """Return the size of each client's upload, [C], which is that of the broadcast; None with a codec."""
        return None if self.codec else dense_bits(model_of(broadcast), task, clients)

    def final(self, server: Arrays) -> Arrays:
        """Return the model's parameters."""
        return server


def model_of(arrays: Arrays) -> Arrays:
    """Return what clients train: a server state or a broadcast without what downloads and server optimizers keep."""
    return OPTIMIZER.without(DOWNLOAD.without(arrays))


def broadcast_all(server: Arrays) -> Broadcast:
    """Send all tensors of the server state to every client, whatever it holds already."""
    return Broadcast(server, full=DensePayload.of(server), update=None)


def dense_bits(tensors: Arrays, task: Task, clients: IntArray) -> IntArray:
    """Return the size of these tensors, uncoded, for each client that has examples, [C]; 0 for the others."""
    bits = dense_wire_bits(sum(values.size for values in tensors.values()), dtype_of(tensors))
    return np.where(task.data.examples[clients] > 0, bits, 0)
