"""Low-rank changes A B, of an item matrix and of a network: hyper-parameters, server state, training and sums.

Matrix factorisation: letters Q [N, d], A [N, r], B [r, d]. The paper of CoLR writes the transposes: Q [d, N],
B [d, r], A [r, N].

Networks: every weight with two or more dimensions changes so, the rest is trained and sent whole. A weight is viewed as
the matrix W [m, d] whose shorter side is d, transposed if that is the first. Clients train A [m, r] of W + A B, where
B [r, d] is drawn from the round's seed and the weight's name, and r is `rank`, or d if that is less.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from narrowcast.algorithms.channel.joint import head_bits
from narrowcast.algorithms.client.client_pass import Arrived, ClientPass, Contribution
from narrowcast.algorithms.client.row_uploads import RowCall, float_bits, row_coding
from narrowcast.algorithms.client.sums import (
    COMPONENT_WEIGHTS,
    ROWS,
    TENSORS,
    WEIGHT,
    MaskGroup,
    RowSum,
    SumBlock,
    SumLayout,
    TensorSum,
    largest_weight,
    row_sum_layout,
    tensor_weights,
)
from narrowcast.algorithms.client.uploads import BASIS, UPDATE, Columns, Message
from narrowcast.algorithms.codecs.chain import Codec, Stages
from narrowcast.algorithms.codecs.low_rank import BasisKind, draw_basis
from narrowcast.algorithms.codecs.messages import DensePayload, RowLayout, RowsPayload, dense_wire_bits
from narrowcast.algorithms.codecs.wire import dtype_of
from narrowcast.algorithms.federated.downloads import (
    CodedChange,
)
from narrowcast.algorithms.federated.fedmf import RowAveraging
from narrowcast.algorithms.federated.shared_basis import (
    UpdateSizes,
    basis_seed,
    draw_components,
)
from narrowcast.algorithms.local_training.factorisation import RowCohort
from narrowcast.platform.contracts import Broadcast, LocalCall, Task
from narrowcast.platform.models.factorisation import ITEM_FACTORS
from narrowcast.platform.types import (
    Arrays,
    BoolArray,
    Chunk,
    IntArray,
    LocalTerms,
    LocalUpdates,
    Payload,
)

_BASIS, _UPDATE, _CHANGED = "basis", "update", "changed_rows"


class LowRankSettings(RowAveraging, ClientPass, ABC):
    """The hyper-parameters of CoLR and SCoLR, and the ranks that follow from them."""

    clients_choose_ranks: ClassVar[bool]

    kind: str
    rank: int = Field(4, ge=1, description="rank of the global update; at most model.embedding_dim")
    basis: BasisKind = "orthonormal"
    rows: RowLayout = "touched"
    downlink_codec: Stages = Field((), description="codec of the mean of A on its way to clients that follow")

    @property
    def row_layout(self) -> RowLayout:
        """The field `rows`."""
        return self.rows

    @abstractmethod
    def choose_ranks(
        self, sizes: Callable[[], UpdateSizes], chunk: Chunk, task: Task
    ) -> tuple[IntArray, IntArray | None]:
        """Return r_u of each client, [C], and the levels [C] that its codec tries first; None for the codec's own.

        `sizes` computes the sizes of the updates, for an algorithm whose ranks depend on them.
        """

    @property
    def coded_change(self) -> CodedChange:
        """The coding of the mean of A, by which the server moves its model too."""
        return CodedChange(self.downlink_codec)


@dataclass(frozen=True)
class RowForm:
    """Low-rank changes of Q: clients send the touched rows of A."""

    algorithm: LowRankSettings

    def init(self, model: Arrays) -> Arrays:
        """Return Q, A = 0 [N, r], and the rows that the last round changed: none."""
        n_items = len(model[ITEM_FACTORS])
        update = np.zeros((n_items, self.algorithm.rank), dtype=np.float32)
        coded = self.algorithm.coded_change.init({_UPDATE: update.shape})
        held = self.algorithm.begun_download(model)
        return {**model, _UPDATE: update, _CHANGED: np.zeros(n_items, dtype=bool), **coded, **held}

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Return Q for a newcomer; the last round's rows of A for a client that holds the rest; B as its seed."""
        item_factors, seed = np.asarray(server[ITEM_FACTORS]), basis_seed(task.seed, round_index)
        n_items, dimension = item_factors.shape
        algorithm, changed = self.algorithm, np.flatnonzero(server[_CHANGED])
        basis = {_BASIS: draw_basis(algorithm.basis, algorithm.rank, dimension, seed)}
        if algorithm.download is not None:
            sent = algorithm.download.broadcast(self.final(server), server, task, round_index, seed)
            return replace(sent, arrays={**sent.arrays, **basis})
        update: Payload = algorithm.coded_change.message(server, seed) or RowsPayload(
            n_items, changed, np.asarray(server[_UPDATE])[changed], algorithm.rows, mask=False, seed=seed
        )
        return Broadcast(
            {ITEM_FACTORS: item_factors, **basis, **algorithm.coded_change.broadcast(seed)},
            full=RowsPayload(n_items, np.arange(n_items), item_factors, "all", mask=False, seed=seed),
            update=update if round_index > 1 else None,
        )

    def row_call(self, broadcast: Arrays, cohort: RowCohort) -> RowCall:
        """Train r_u components of A on each client with Q and B frozen, and send them."""
        algorithm, chunk, task = self.algorithm, cohort.chunk, cohort.task
        ranks, levels = algorithm.choose_ranks(partial(self._sizes, cohort), chunk, task)
        components = draw_components(ranks, algorithm.rank, chunk.clients, task.seed, chunk.round_index)
        coding = row_coding(Codec(algorithm.codec), algorithm.rows, levels)
        item_factors, basis = np.asarray(broadcast[ITEM_FACTORS]), np.asarray(broadcast[_BASIS])
        return RowCall(cohort, components, partial(cohort.train_components, item_factors, basis, components), coding)

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays) -> Arrays:
        """Return A = server_learning_rate * mean of the clients' A, as clients decode it, and Q + A B."""
        rows, algorithm = RowSum.of(total), self.algorithm
        mean = rows.mean() * np.float32(algorithm.server_learning_rate)
        sent, coded = algorithm.coded_change.send({_UPDATE: mean}, server, broadcast)
        held = algorithm.kept_download(self.final(server), server, broadcast)
        change = torch.from_numpy(sent[_UPDATE]) @ torch.from_numpy(np.array(broadcast[_BASIS]))
        item_factors = np.asarray(server[ITEM_FACTORS]) + change.numpy()
        return {ITEM_FACTORS: item_factors, **sent, _CHANGED: rows.changed_rows(), **coded, **held}

    def final(self, server: Arrays) -> Arrays:
        """Return Q."""
        return {ITEM_FACTORS: server[ITEM_FACTORS]}

    def sum_layout(self, task: Task, cohort: int) -> SumLayout:
        """Return one group for all of A; with chosen ranks, one for each column of A and one for shared counts."""
        algorithm, n_items = self.algorithm, task.data.n_items
        whole = row_sum_layout(algorithm.aggregation, algorithm.rank, task, cohort)
        if not algorithm.clients_choose_ranks:
            return whole
        by_component = algorithm.aggregation == "per_component_mean"
        columns = [
            MaskGroup(
                (SumBlock(ROWS, component, n_items),), (SumBlock(WEIGHT, component, n_items),) if by_component else ()
            )
            for component in range(algorithm.rank)
        ]
        shared = () if by_component else (MaskGroup((), whole.groups[0].counts),)

        def groups_of_ranks(ranks: IntArray, clients: IntArray, seed: int, round_index: int) -> BoolArray:
            drawn = draw_components(ranks, algorithm.rank, clients, seed, round_index)
            return np.hstack([drawn.any(axis=1, keepdims=True)] * len(shared) + [drawn])

        return replace(whole, groups=(*shared, *columns), max_rank=algorithm.rank, groups_of_ranks=groups_of_ranks)

    def _sizes(self, cohort: RowCohort) -> UpdateSizes:
        algorithm, rows = self.algorithm, cohort.n_rows.astype(np.float64)
        ranks = np.arange(algorithm.rank + 1)
        unexpected = cohort.positives if cohort.task.training.shared_negatives else cohort.n_rows
        bits = float_bits(cohort, ranks[None, :], algorithm.aggregation, algorithm.rows)
        return UpdateSizes(
            float_bits=np.broadcast_to(bits, (len(rows), len(ranks))),
            values=rows[:, None] * ranks[1:],
            head_bits=head_bits(cohort.task.data.n_items, unexpected),
            rows=rows,
        )


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

    algorithm: LowRankSettings

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

    def local_call(self, broadcast: Arrays, chunk: Chunk, task: Task) -> LocalCall:
        """Return the training of A from zero and of the vectors, with gradients times sqrt(r / d) for each A."""
        model = self.final(broadcast)
        factors, columns = self._factors(model), self._columns(model, chunk, task)
        start = {
            name: np.zeros((factors[name].long, factors[name].rank), dtype_of(model)) if name in factors else values
            for name, values in model.items()
        }
        gains = {
            name: (columns.masks[name] * (factor.rank / factor.short) ** 0.5).astype(model[name].dtype)[:, None, :]
            for name, factor in factors.items()
        }
        frozen = {name: model[name] for name in factors} | BASIS.add(BASIS.of(broadcast))
        terms = LocalTerms(gains=gains, rebuild=FactoredWeights(tuple(factors.items())), frozen=frozen)
        return LocalCall(start, chunk, task, terms)

    def message(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> Message:
        """Send A, in the columns that each client trained, and the vectors."""
        return Message(updates.changes, columns=self._columns(self.final(broadcast), chunk, task))

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return A and the vectors, by the clients' examples.

        Each component is divided by the examples of the clients that sent it, or of all clients (`weighted`).
        """
        weight, counts = tensor_weights("examples", task, chunk, arrived.delivered), {}
        if self.algorithm.aggregation != "weighted":
            masks = self._columns(self.final(broadcast), chunk, task).masks
            counts = COMPONENT_WEIGHTS.add({name: weight[:, None] * mask for name, mask in masks.items()})
        return Contribution(arrived.tensors, weight, sums=counts)

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
            MaskGroup(
                tuple(SumBlock(TENSORS.name(name), None, values.size) for name, values in vectors.items()),
                (SumBlock(WEIGHT, None, 1),),
            )
        ]
        divided = self.algorithm.aggregation != "weighted"
        for name, factor in factors.items():
            key, divisor = TENSORS.name(name), COMPONENT_WEIGHTS.name(name)
            shapes[key] = ((factor.long, factor.rank), model[name].dtype)
            if divided:
                shapes[divisor] = ((factor.rank,), np.float64)
            groups += [
                MaskGroup((SumBlock(key, component, factor.long),), (SumBlock(divisor, component, 1),) * divided)
                for component in range(factor.rank)
            ]
        most = largest_weight(task, cohort)
        if not self.algorithm.clients_choose_ranks:
            whole = MaskGroup(
                tuple(part for group in groups for part in group.values),
                tuple(part for group in groups for part in group.counts),
            )
            return SumLayout((whole,), shapes, most, cohort, one_weight=True)

        def groups_of_ranks(ranks: IntArray, clients: IntArray, seed: int, round_index: int) -> BoolArray:
            masks = [
                draw_components(ranks, factor.rank, clients, seed, round_index, name)
                for name, factor in factors.items()
            ]
            return np.hstack([(ranks > 0)[:, None], *masks])

        return SumLayout(tuple(groups), shapes, most, cohort, True, self.algorithm.rank, groups_of_ranks)

    def _factors(self, model: Arrays) -> dict[str, Factor]:
        """Return the factors of all weights; vectors have none."""
        factors = {name: Factor.of(values.shape, self.algorithm.rank) for name, values in model.items()}
        return {name: factor for name, factor in factors.items() if factor}

    def _columns(self, model: Arrays, chunk: Chunk, task: Task) -> Columns:
        """Return r_u of each client, and the components that it trains of each weight."""
        ranks, _ = self.algorithm.choose_ranks(partial(self._sizes, model, len(chunk.clients)), chunk, task)
        masks = {
            name: draw_components(ranks, factor.rank, chunk.clients, task.seed, chunk.round_index, name)
            for name, factor in self._factors(model).items()
        }
        return Columns(ranks, masks)

    def _sizes(self, model: Arrays, n_clients: int) -> UpdateSizes:
        factors, dtype = self._factors(model).values(), dtype_of(model)
        vectors = sum(values.size for values in model.values() if values.ndim < 2)
        bits = [
            dense_wire_bits(vectors + sum(factor.long * min(rank, factor.rank) for factor in factors), dtype)
            for rank in range(self.algorithm.rank + 1)
        ]
        of_clients = np.broadcast_to(np.array(bits), (n_clients, len(bits)))
        return UpdateSizes(of_clients, values=of_clients[:, 1:] / (8 * dtype.itemsize), head_bits=np.zeros(n_clients))
