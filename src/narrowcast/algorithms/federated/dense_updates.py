"""Updates that are whole tensors: what the algorithms share that sum them up."""

from __future__ import annotations

import time
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.dense import DensePayload, dense_wire_bits
from narrowcast.algorithms.codecs.stages import Stages
from narrowcast.algorithms.federated.codec_state import init_codec_state
from narrowcast.algorithms.federated.dense_uploads import Uploads
from narrowcast.platform.contracts import AlgorithmDefaults, Broadcast, LocalCall, Task
from narrowcast.platform.types import (
    NO_RANK,
    Arrays,
    BoolArray,
    Chunk,
    ChunkResult,
    ClientLedger,
    FloatArray,
    IntArray,
    LocalUpdates,
)

Weights = Literal["examples", "equal"]
"""What a client counts in the mean: its training examples, as FedAvg has it, or the same as every other."""

SUM, WEIGHT = "sum/", "weight"
"""Names in a partial sum: `sum/NAME` for every tensor, and the sum of the weights."""


class LocalThenUpload(AlgorithmDefaults, BaseModel):
    """What the algorithms share whose clients train by `task.training` alone, and then send, in float32 or a codec."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    codec: Stages = ()

    def local_call(self, broadcast: Arrays, chunk: Chunk, task: Task) -> LocalCall:
        """What the chunk's clients train."""
        raise NotImplementedError

    def upload(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> ChunkResult:
        """What they send and keep of it."""
        raise NotImplementedError

    def train(self, broadcast: Arrays, chunk: Chunk, task: Task) -> ChunkResult:
        """The client half: train a chunk of clients and put together what they send."""
        call = self.local_call(broadcast, chunk, task)
        updates = task.training.train(call.server, chunk, task, call.terms)
        began = time.perf_counter()
        return self.upload(broadcast, chunk, task, updates).encoded_since(began)


class WholeModel(LocalThenUpload):
    """What the algorithms share whose server holds the model and nothing else."""

    server_learning_rate: float = Field(1.0, gt=0)

    def check(self, task: Task) -> None:
        """Every model fits."""

    def init(self, task: Task) -> Arrays:
        """The model's parameters."""
        return task.model.init_server(task.data, task.seed)

    def init_clients(self, task: Task) -> Arrays:
        """What the model and the codec keep on the clients."""
        shapes = {name: values.shape for name, values in self.init(task).items()}
        codec = init_codec_state(Codec(self.codec), task.data.n_clients, shapes)
        return {**task.model.init_clients(task.data, task.seed), **codec}

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """The whole model."""
        del task, round_index
        return broadcast_dense(server, server)

    def upload_bits(self, broadcast: Arrays, task: Task, clients: IntArray) -> IntArray | None:
        """As much as is broadcast."""
        return float_bits(self.codec, broadcast, task, clients)

    def final(self, server: Arrays) -> Arrays:
        """The model's parameters."""
        return server


def float_bits(codec: Stages, tensors: Arrays, task: Task, clients: IntArray) -> IntArray | None:
    """What these tensors weigh in float32 for each client that has data, [C]; None where a codec decides it."""
    weight = dense_wire_bits(sum(values.size for values in tensors.values()))
    return None if codec else np.where(task.data.examples[clients] > 0, weight, 0)


def broadcast_dense(server: Arrays, tensors: Arrays) -> Broadcast:
    """Send these tensors whole to every client of the round, whatever it holds already."""
    return Broadcast(server, full=DensePayload.of(tensors), update=None)


def client_weights(weights: Weights, task: Task, chunk: Chunk, delivered: BoolArray) -> FloatArray:
    """The weight of each client in the mean, zero where it did not deliver. [C]."""
    examples = task.data.examples[chunk.clients].astype(np.float64)
    return np.where(delivered, examples if weights == "examples" else 1.0, 0.0)


def weighted_sum(changes: Arrays, weight: FloatArray) -> dict[str, NDArray[Any]]:
    """sum_u w_u change_u of each tensor; clients of weight zero may hold anything."""
    kept = np.flatnonzero(weight)
    with np.errstate(over="ignore", invalid="ignore"):
        return {
            SUM + name: np.tensordot(weight[kept].astype(values.dtype), values[kept], axes=1)
            for name, values in changes.items()
        }


def weighted_mean(total: Arrays, name: str) -> NDArray[Any]:
    """The mean of one tensor; zero where nobody delivered."""
    weight = float(total[WEIGHT])
    return np.asarray(total[SUM + name]) / (weight or 1.0)


def of_clients(chosen: BoolArray, values: NDArray[Any], others: NDArray[Any]) -> NDArray[Any]:
    """The chosen clients' rows of `values` [C, ...], and of `others` [C, ...] those of the rest."""
    return np.where(chosen.reshape(-1, *[1] * (values.ndim - 1)), values, others)


def finish_dense(
    chunk: Chunk,
    updates: LocalUpdates,
    uploads: Uploads,
    partial: Arrays,
    *,
    rank: IntArray | None = None,
    state: Arrays | None = None,
) -> ChunkResult:
    """Put a chunk's result together.

    Shapes: rank [C], 0 in the ledger for who sends nothing; state [C, ...], what the algorithm adds to the clients'.
    A client keeps what it learnt privately even where its update is not sent or is lost, and what it had where its
    training left the finite numbers.
    """
    learnt = {name: of_clients(uploads.trained, values, chunk.state[name]) for name, values in updates.state.items()}
    return ChunkResult(
        index=chunk.index,
        partial=partial,
        state={**learnt, **uploads.state, **(state or {})},
        ledger=ClientLedger(
            client=chunk.clients,
            rank=np.full(len(chunk.clients), NO_RANK) if rank is None else np.where(uploads.bits > 0, rank, 0),
            uplink_bits=uploads.bits,
            examples=updates.examples,
            loss=updates.loss,
            delivered=uploads.delivered,
        ),
    )
