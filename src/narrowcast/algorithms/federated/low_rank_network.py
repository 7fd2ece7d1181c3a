"""CoLR and SCoLR for any torch model: low-rank changes of every weight with two or more dimensions, the rest whole.

A weight is seen as the matrix W [m, d] whose shorter side is d, transposed where that is the first. Clients train
A [m, r] of W + A B, where B [r, d] is drawn from the round's seed and the weight's name, and r is `rank`, or d where
that is less. Biases and other vectors are trained and sent whole. With `basis: own` all weights are trained whole, and
what clients send of them is theirs to choose (`own_basis_network`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.dense import DensePayload, dense_wire_bits
from narrowcast.algorithms.codecs.stages import Stages
from narrowcast.algorithms.federated.dense_updates import SUM, WEIGHT, client_weights, finish_dense
from narrowcast.algorithms.federated.dense_uploads import Columns, send_tensors
from narrowcast.algorithms.federated.row_uploads import Aggregation
from narrowcast.algorithms.federated.shared_basis import BasisKind, draw_basis, draw_components
from narrowcast.platform.contracts import Broadcast, LocalCall, Task
from narrowcast.platform.types import Arrays, BoolArray, Chunk, ChunkResult, IntArray, LocalTerms, LocalUpdates

_BASIS, _UPDATE, COMPONENT_WEIGHT = "basis/", "update/", "component weight/"


class LowRankSettings(Protocol):
    """The fields of CoLR and SCoLR that a network's clients need."""

    @property
    def rank(self) -> int:
        """Largest rank of a weight's change."""
        ...

    @property
    def basis(self) -> BasisKind | Literal["own"]:
        """Where B comes from."""
        ...

    @property
    def aggregation(self) -> Aggregation:
        """What a component is divided by."""
        ...

    @property
    def server_learning_rate(self) -> float:
        """Times the mean."""
        ...

    @property
    def codec(self) -> Stages:
        """What the columns of A and the vectors are sent through."""
        ...


@dataclass(frozen=True)
class Factor:
    """How one weight is factorised. Shapes: A [long, rank], B [rank, short]."""

    shape: tuple[int, ...]
    long: int
    short: int
    rank: int
    transposed: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], rank: int) -> Factor | None:
        """The factor of a tensor of this shape, None for a vector."""
        if len(shape) < 2:
            return None
        rows, columns = shape[0], prod(shape[1:])
        short = min(rows, columns)
        return cls(shape, max(rows, columns), short, min(rank, short), transposed=rows < columns)

    def change(self, a: Tensor, basis: Tensor) -> Tensor:
        """A B in the weight's own shape."""
        product = a @ basis
        return (product.T if self.transposed else product).reshape(self.shape)


def factors_of(algorithm: LowRankSettings, model: Arrays) -> dict[str, Factor]:
    """The factors of all weights that have one."""
    if algorithm.basis == "own":
        return {}
    factors = {name: Factor.of(values.shape, algorithm.rank) for name, values in model.items()}
    return {name: factor for name, factor in factors.items() if factor}


def init_network(algorithm: LowRankSettings, model: Arrays) -> Arrays:
    """The parameters, and the change that the last round made to them."""
    factors = factors_of(algorithm, model)
    shapes = {
        name: (factors[name].long, factors[name].rank) if name in factors else model[name].shape for name in model
    }
    return {**model, **{_UPDATE + name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}}


def final_network(server: Arrays) -> Arrays:
    """The parameters."""
    return {name: values for name, values in server.items() if not name.startswith(_UPDATE)}


def broadcast_network(algorithm: LowRankSettings, server: Arrays, seed: int, *, first: bool) -> Broadcast:
    """All parameters for a newcomer; the last round's A and vectors for a client that holds the rest."""
    model = final_network(server)
    bases: Arrays = {}
    if algorithm.basis != "own":
        factors = factors_of(algorithm, model)
        bases = {
            _BASIS + name: draw_basis(algorithm.basis, factor.rank, factor.short, seed, name)
            for name, factor in factors.items()
        }
    sent = seed if bases else None
    update = {name: values for name, values in server.items() if name.startswith(_UPDATE)}
    return Broadcast(
        {**model, **bases},
        full=DensePayload.of(model, seed=sent),
        update=None if first else DensePayload.of(update, seed=sent),
    )


def network_bits_at_rank(algorithm: LowRankSettings, broadcast: Arrays) -> IntArray:
    """The weight of an update of rank 0, 1, ..., `rank`: [rank + 1]."""
    model = _model(broadcast)
    factors = factors_of(algorithm, model).values()
    vectors = sum(values.size for values in model.values() if values.ndim < 2)
    return np.array(
        [
            dense_wire_bits(vectors + sum(factor.long * min(each, factor.rank) for factor in factors))
            for each in range(algorithm.rank + 1)
        ]
    )


def network_call(algorithm: LowRankSettings, broadcast: Arrays, chunk: Chunk, task: Task, ranks: IntArray) -> LocalCall:
    """Train `ranks[u]` components of each weight on client u, or whole weights with `basis: own`."""
    model = _model(broadcast)
    if algorithm.basis == "own":
        return LocalCall(model, chunk, task, LocalTerms())
    factors = factors_of(algorithm, model)
    components = _components(factors, chunk, task, ranks)
    start = {
        name: np.zeros((factors[name].long, factors[name].rank), dtype=np.float32) if name in factors else values
        for name, values in model.items()
    }
    gains = {
        name: (components[name] * (factor.rank / factor.short) ** 0.5).astype(np.float32)[:, None, :]
        for name, factor in factors.items()
    }
    frozen = {name: values for name, values in broadcast.items() if name in factors or name.startswith(_BASIS)}
    terms = LocalTerms(gains=gains, rebuild=lambda trained, kept: _rebuild(factors, trained, kept), frozen=frozen)
    return LocalCall(start, chunk, task, terms)


def network_upload(
    algorithm: LowRankSettings, broadcast: Arrays, chunk: Chunk, task: Task, ranks: IntArray, updates: LocalUpdates
) -> ChunkResult:
    """Add up what the clients send.

    Each component is divided by the examples of the clients that sent it (`per_item_mean`), or of all (`weighted`).
    """
    model = _model(broadcast)
    factors = factors_of(algorithm, model)
    components = _components(factors, chunk, task, ranks)
    codec = Codec(algorithm.codec)
    if algorithm.basis == "own":
        uploads = send_tensors(task, chunk, updates, updates.changes, codec, own_rank=algorithm.rank)
    else:
        uploads = send_tensors(task, chunk, updates, updates.changes, codec, Columns(ranks, components))
    weight = client_weights("examples", task, chunk, uploads.delivered)
    kept = np.flatnonzero(weight)
    partial: dict[str, NDArray[np.floating]] = {WEIGHT: np.array(weight.sum())}
    for name, values in uploads.changes.items():
        partial[SUM + name] = np.tensordot(weight[kept].astype(np.float32), values[kept], axes=1)
        if name in factors and algorithm.aggregation != "weighted":
            partial[COMPONENT_WEIGHT + name] = weight @ components[name]
    return finish_dense(chunk, updates, uploads, partial, rank=ranks if uploads.ranks is None else uploads.ranks)


def step_network(algorithm: LowRankSettings, server: Arrays, broadcast: Arrays, total: Arrays) -> Arrays:
    """W += rate * mean(A) B for each weight, and the mean change at that rate for each vector."""
    model = final_network(server)
    factors, rate = factors_of(algorithm, model), algorithm.server_learning_rate
    after: dict[str, NDArray[np.float32]] = {}
    for name, values in model.items():
        divisor = total.get(COMPONENT_WEIGHT + name, total[WEIGHT])
        mean = (rate * total[SUM + name] / np.where(divisor > 0, divisor, 1.0)).astype(np.float32)
        after[_UPDATE + name] = mean
        change = mean
        if name in factors:
            basis = torch.from_numpy(np.array(broadcast[_BASIS + name]))
            change = factors[name].change(torch.from_numpy(mean), basis).numpy()
        after[name] = values + change
    return after


def _rebuild(
    factors: dict[str, Factor], trained: Mapping[str, Tensor], frozen: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The module's parameters from the A and the vectors that a client trains."""
    return {
        name: frozen[name] + factors[name].change(values, frozen[_BASIS + name]) if name in factors else values
        for name, values in trained.items()
    }


def _model(broadcast: Arrays) -> Arrays:
    return {name: values for name, values in broadcast.items() if not name.startswith(_BASIS)}


def _components(factors: dict[str, Factor], chunk: Chunk, task: Task, ranks: IntArray) -> dict[str, BoolArray]:
    return {
        name: draw_components(ranks, factor.rank, chunk.clients, task.seed, chunk.round_index, name)
        for name, factor in factors.items()
    }
