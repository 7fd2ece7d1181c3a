"""CoLR and SCoLR of networks: low-rank changes A B of every weight with two or more dimensions, the rest whole.

A weight is viewed as the matrix W [m, d] whose shorter side is d, transposed if that is the first. Clients train
A [m, r] of W + A B, where B [r, d] is drawn from the round's seed and the weight's name, and r is `rank`, or d if that
is less. Biases and other vectors are trained and sent whole.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from narrowcast.algorithms.client.sums import (
    COMPONENT_WEIGHTS,
    TENSORS,
    WEIGHT,
    Group,
    Part,
    SumLayout,
    TensorSum,
    largest_weight,
    tensor_weights,
)
from narrowcast.algorithms.client.uploads import BASIS, UPDATE, Columns, chunk_result, send_tensors, tensor_coding
from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.low_rank import draw_basis
from narrowcast.algorithms.codecs.messages import DensePayload, dense_wire_bits
from narrowcast.algorithms.codecs.wire import dtype_of
from narrowcast.algorithms.federated.shared_basis import UpdateSizes, basis_seed, draw_components
from narrowcast.platform.contracts import Broadcast, LocalCall, Task
from narrowcast.platform.types import Arrays, BoolArray, Chunk, ChunkResult, IntArray, LocalTerms, LocalUpdates, Payload

if TYPE_CHECKING:
    from narrowcast.algorithms.federated.low_rank import LowRank


@dataclass(frozen=True)
class Factor:
    """The shape of one weight's factors. Shapes: A [long, rank], B [rank, short]."""

    shape: tuple[int, ...]
    long: int
    short: int
    rank: int
    transposed: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], rank: int) -> Factor | None:
        """Return the factor of a tensor of this shape; None for a vector."""
        if len(shape) < 2:
            return None
        rows, columns = shape[0], prod(shape[1:])
        short = min(rows, columns)
        return cls(shape, max(rows, columns), short, min(rank, short), transposed=rows < columns)

    def change(self, a: Tensor, basis: Tensor) -> Tensor:
        """Return A B in the weight's own shape."""
        product = a @ basis
        return (product.T if self.transposed else product).reshape(self.shape)


@dataclass(frozen=True)
class FactoredWeights:
    """The parameters of a module from the A and the vectors that a client trains, and from W and B."""

    factors: tuple[tuple[str, Factor], ...]

    def __call__(self, trained: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return W + A B for each weight, and the vectors."""
        changes = {
            name: frozen[name] + factor.change(trained[name], frozen[BASIS.name(name)]) for name, factor in self.factors
        }
        return {**trained, **changes}


@dataclass(frozen=True)
class NetworkForm:
    """Low-rank changes of a network's weights: clients send columns of each A, and the vectors."""

    algorithm: LowRank

    def init(self, model: Arrays) -> Arrays:
        """Return the parameters, and the change that the last round made to them: none."""
        factors = self._factors(model)
        shapes = {
            name: (factors[name].long, factors[name].rank) if name in factors else model[name].shape for name in model
        }
        dtype = dtype_of(model)
        update = {name: np.zeros(shape, dtype) for name, shape in shapes.items()}
        return {**model, **UPDATE.add(update), **self.algorithm.coded_change.init(shapes, dtype)}

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Return all parameters for a newcomer; the last round's A and vectors for a client that holds the rest."""
        model, seed = self.final(server), basis_seed(task.seed, round_index)
        dtype = dtype_of(model)
        bases = {
            name: draw_basis(self.algorithm.basis, factor.rank, factor.short, seed, name, dtype)
            for name, factor in self._factors(model).items()
        }
        coded = self.algorithm.coded_change
        update: Payload = coded.message(server, seed, dtype) or DensePayload.of(UPDATE.of(server), seed=seed)
        return Broadcast(
            {**model, **BASIS.add(bases), **coded.broadcast(seed)},
            full=DensePayload.of(model, seed=seed),
            update=update if round_index > 1 else None,
        )

    def train(self, broadcast: Arrays, chunk: Chunk, task: Task) -> ChunkResult:
        """Train r_u components of each A on each client with W and B frozen, and send them with the vectors."""
        call = self.local_call(broadcast, chunk, task)
        updates = task.training.train(call.server, chunk, task, call.terms)
        began = time.perf_counter()
        return self.upload(broadcast, chunk, task, updates).encoded_since(began)

    def local_call(self, broadcast: Arrays, chunk: Chunk, task: Task) -> LocalCall:
        """Return the training of A from zero and of the vectors, with gradients times sqrt(r / d) for each A."""
        model = self.final(broadcast)
        factors, columns = self._factors(model), self._columns(model, chunk, task)
        start = {
            name: np.zeros((factors[name].long, factors[name].rank), dtype_of(model)) if name in factors else values
            for name, values in model.items()
        }
        gains = {
            name: (columns.own[name] * (factor.rank / factor.short) ** 0.5).astype(model[name].dtype)[:, None, :]
            for name, factor in factors.items()
        }
        frozen = {name: model[name] for name in factors} | BASIS.add(BASIS.of(broadcast))
        terms = LocalTerms(gains=gains, rebuild=FactoredWeights(tuple(factors.items())), frozen=frozen)
        return LocalCall(start, chunk, task, terms)

    def upload(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> ChunkResult:
        """Send A and the vectors, and add them up by the clients' examples.

        Each component is divided by the examples of the clients that sent it, or of all clients (`weighted`).
        """
        columns = self._columns(self.final(broadcast), chunk, task)
        received, uploads = send_tensors(chunk, task, updates, tensor_coding(Codec(self.algorithm.codec)), columns)
        weight = tensor_weights("examples", task, chunk, uploads.delivered)
        total = TensorSum.weighted(received, weight)
        if self.algorithm.aggregation != "weighted":
            total = replace(total, component_weights={name: weight @ own for name, own in columns.own.items()})
        return chunk_result(chunk, updates, uploads, total.arrays())

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays) -> Arrays:
        """Return W + A B for each weight, with A = server_learning_rate * mean of the clients' A; vectors likewise.

        A and the vectors are those that clients decode.
        """
        model, sums, bases = self.final(server), TensorSum.of(total), BASIS.of(broadcast)
        factors, rate = self._factors(model), self.algorithm.server_learning_rate
        mean: dict[str, NDArray[Any]] = {}
        for name, values in model.items():
            divisor = sums.component_weights.get(name, sums.weight)
            mean[name] = (rate * sums.tensors[name] / np.where(divisor > 0, divisor, 1.0)).astype(values.dtype)
        sent, coded = self.algorithm.coded_change.send(mean, server, broadcast)
        after: dict[str, NDArray[Any]] = {**UPDATE.add(sent), **coded}
        for name, values in model.items():
            change = sent[name]
            if name in factors:
                basis = torch.from_numpy(np.array(bases[name]))
                change = factors[name].change(torch.from_numpy(change), basis).numpy()
            after[name] = values + change
        return after

    def final(self, server: Arrays) -> Arrays:
        """Return the parameters in a server state, or in a broadcast."""
        return self.algorithm.coded_change.without(BASIS.without(UPDATE.without(server)))

    def sum_layout(self, task: Task, cohort: int) -> SumLayout:
        """Return a group for the vectors and one for each component of each weight; one for all if clients send all."""
        model = task.initial_parameters()
        factors = self._factors(model)
        vectors = {name: values for name, values in model.items() if name not in factors}
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {WEIGHT: ((), np.float64)}
        shapes |= {TENSORS.name(name): (values.shape, values.dtype) for name, values in vectors.items()}
        groups = [
            Group(
                tuple(Part(TENSORS.name(name), None, values.size) for name, values in vectors.items()),
                (Part(WEIGHT, None, 1),),
            )
        ]
        divided = self.algorithm.aggregation != "weighted"
        for name, factor in factors.items():
            key, divisor = TENSORS.name(name), COMPONENT_WEIGHTS.name(name)
            shapes[key] = ((factor.long, factor.rank), model[name].dtype)
            if divided:
                shapes[divisor] = ((factor.rank,), np.float64)
            groups += [
                Group((Part(key, each, factor.long),), (Part(divisor, each, 1),) * divided)
                for each in range(factor.rank)
            ]
        most = largest_weight(task, cohort)
        if not self.algorithm.clients_choose_ranks:
            whole = Group(
                tuple(part for group in groups for part in group.values),
                tuple(part for group in groups for part in group.counts),
            )
            return SumLayout((whole,), shapes, most, cohort, one_weight=True)

        def groups_of_ranks(ranks: IntArray, clients: IntArray, seed: int, round_index: int) -> BoolArray:
            own = [
                draw_components(ranks, each.rank, clients, seed, round_index, name) for name, each in factors.items()
            ]
            return np.hstack([(ranks > 0)[:, None], *own])

        return SumLayout(tuple(groups), shapes, most, cohort, True, self.algorithm.rank, groups_of_ranks)

    def _factors(self, model: Arrays) -> dict[str, Factor]:
        """Return the factors of all weights; vectors have none."""
        factors = {name: Factor.of(values.shape, self.algorithm.rank) for name, values in model.items()}
        return {name: factor for name, factor in factors.items() if factor}

    def _columns(self, model: Arrays, chunk: Chunk, task: Task) -> Columns:
        """Return r_u of each client, and the components that it trains of each weight."""
        ranks, _ = self.algorithm.choose_ranks(partial(self._sizes, model, len(chunk.clients)), chunk, task)
        own = {
            name: draw_components(ranks, factor.rank, chunk.clients, task.seed, chunk.round_index, name)
            for name, factor in self._factors(model).items()
        }
        return Columns(ranks, own)

    def _sizes(self, model: Arrays, n_clients: int) -> UpdateSizes:
        factors, dtype = self._factors(model).values(), dtype_of(model)
        vectors = sum(values.size for values in model.values() if values.ndim < 2)
        bits = [
            dense_wire_bits(vectors + sum(factor.long * min(each, factor.rank) for factor in factors), dtype)
            for each in range(self.algorithm.rank + 1)
        ]
        of_clients = np.broadcast_to(np.array(bits), (n_clients, len(bits)))
        return UpdateSizes(of_clients, values=of_clients[:, 1:] / (8 * dtype.itemsize), head_bits=np.zeros(n_clients))
