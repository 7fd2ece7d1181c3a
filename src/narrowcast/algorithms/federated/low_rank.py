"""CoLR and SCoLR: updates of low rank in a random basis B that all clients of a round share and regenerate from a seed.

Reference: Nguyen et al., Towards Efficient Communication and Secure Federated Recommendation System via Low-rank
Training, WWW 2024 (arXiv:2401.03748), section 4.3 and Algorithm 1. Letters: Q [N, d], A [N, r], B [r, d]; the paper
writes their transposes. Of a network, every weight with two or more dimensions changes by A B, and the rest is trained
and sent whole. A weight is viewed as the matrix W [m, d] whose shorter side is d, transposed if that is the first; its
r is the algorithm's rank, or d if that is less.

SCoLR is CoLR in which every client trains and sends as many components as its link affords: section 4.4, equation 6 and
Algorithm 2. The authors released no code for it; with `per_item_mean` and `rank_policy: uniform` this one reproduces
their Table 4. Letters: r_g is the rank of the global update, r_u that of client u's, S_u the components that it trains.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from narrowcast.algorithms.channel.joint import RankLevelGrid, head_bits
from narrowcast.algorithms.client.client_pass import Arrived, Contribution
from narrowcast.algorithms.client.sums import (
    COMPONENT_WEIGHTS,
    GroupsOfRanks,
    SumLayout,
    TensorSum,
    row_columns_layout,
    tensor_columns_layout,
    tensor_weights,
)
from narrowcast.algorithms.client.uploads import Columns, Message, row_bits
from narrowcast.algorithms.codecs.chain import Codec, Stages, refuse_stateful
from narrowcast.algorithms.codecs.low_rank import BasisKind, draw_basis
from narrowcast.algorithms.codecs.messages import RowLayout, dense_wire_bits
from narrowcast.algorithms.codecs.wire import dtype_of
from narrowcast.algorithms.federated.downloads import CodedChange
from narrowcast.algorithms.federated.fedmf import (
    CHANGED_ROWS,
    RowAveraging,
    changed_rows,
    check_rank,
    expected_rows,
    named_rows,
)
from narrowcast.algorithms.federated.rank_policy import RankPolicy, UniformRank, UpdateSizes
from narrowcast.algorithms.local_training.factorisation import RowCohort
from narrowcast.algorithms.local_training.factorisation_kernels import FusedResult
from narrowcast.platform.config.catalog import RANK_POLICIES
from narrowcast.platform.contracts import Broadcast, LocalCall, RateDistortion, Task
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.factorisation import MatrixFactorisation
from narrowcast.platform.models.model import ITEM_FACTORS
from narrowcast.platform.seeds import generator, stream_keys, uniform_bits
from narrowcast.platform.traits import Traits
from narrowcast.platform.types import (
    Arrays,
    BoolArray,
    Chunk,
    FloatArray,
    IntArray,
    LocalTerms,
    LocalUpdates,
    PrefixedArrays,
    RowChanges,
)


def label(name: str) -> str:
    """Return the name of a tensor in random streams: that of an item matrix, which is alone, is empty."""
    return "" if name == ITEM_FACTORS else name


class TensorNames(PrefixedArrays):
    """Arrays of each tensor under a prefix; that of an item matrix is named by the prefix alone."""

    def name(self, name: str) -> str:
        """Return the full name of an array of this part."""
        return super().name(label(name)).removesuffix("/")

    def add(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Return arrays under their full names."""
        return {self.name(name): values for name, values in arrays.items()}

    def of(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Return the arrays of this part under the names of their tensors."""
        if (alone := self.name(ITEM_FACTORS)) in arrays:
            return {ITEM_FACTORS: arrays[alone]}
        return super().of(arrays)


BASIS = TensorNames("basis/")
"""B of each weight, in a broadcast."""
_UPDATE = TensorNames("update/")
"""A of the last round, and the vectors' change, in a server state."""


def basis_seed(seed: int, round_index: int) -> int:
    """Return the 64-bit seed that the server sends for the basis of a round."""
    return int(generator(seed, "basis", round_index).integers(2**64, dtype=np.uint64))


def draw_components(
    ranks: IntArray, rank: int, clients: IntArray, seed: int, round_index: int, name: str = ""
) -> BoolArray:
    """Return S_u of each client, [C, rank]: a random subset of `ranks[u]` of the components of the tensor `name`."""
    if (ranks >= rank).all():
        return np.ones((len(clients), rank), dtype=bool)
    keys = stream_keys(seed, "components" + name, round_index, clients)
    order = uniform_bits(keys[:, None], np.arange(rank)[None, :]).argsort(axis=1)
    components = np.zeros((len(clients), rank), dtype=bool)
    np.put_along_axis(components, order, np.arange(rank) < ranks[:, None], axis=1)
    return components


@dataclass(frozen=True)
class Factor:
    """The shape of the factors of a weight W, or of the item matrix. Shapes: A [long, rank], B [rank, short]."""

    shape: tuple[int, ...]
    long: int
    short: int
    rank: int
    transposed: bool

    @classmethod
    def all_of(cls, model: Arrays, rank: int) -> dict[str, Factor]:
        """Return the factors of an item matrix, or of a network's weights; vectors have none."""
        if ITEM_FACTORS in model:
            n_items, dimension = shape = model[ITEM_FACTORS].shape
            return {ITEM_FACTORS: cls(shape, n_items, dimension, rank, transposed=False)}
        factors = {name: cls.of(values.shape, rank) for name, values in model.items()}
        return {name: factor for name, factor in factors.items() if factor}

    @classmethod
    def of(cls, shape: tuple[int, ...], rank: int) -> Factor | None:
        """Return the factor of a tensor of this shape; None for a vector."""
        if len(shape) < 2:
            return None
        rows, columns = shape[0], prod(shape[1:])
        short = min(rows, columns)
        return cls(shape, max(rows, columns), short, min(rank, short), transposed=rows < columns)

    def change_of(self, a: NDArray[Any], basis: NDArray[Any]) -> NDArray[Any]:
        """Return A B in the weight's own shape, of arrays."""
        return self.change(torch.from_numpy(a), torch.from_numpy(np.array(basis))).numpy()

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


class LowRank(RowAveraging, ABC):
    """Changes of low rank in a basis that all clients of a round share.

    The item matrix of matrix factorisation changes so, or each weight of a network; a network's vectors are trained and
    sent whole. With `download` clients are sent Q itself, as `CodedDownload` says, in place of the last round's mean
    of A.
    """

    clients_choose_ranks: ClassVar[bool]

    kind: str
    rank: int = Field(4, ge=1, description="rank of the global update; at most model.embedding_dim")
    basis: BasisKind = "orthonormal"
    rows: RowLayout = "touched"
    downlink_codec: Stages = Field((), description="codec of the mean of A on its way to clients that follow")

    @abstractmethod
    def choose_ranks(
        self, sizes: Callable[[], UpdateSizes], chunk: Chunk, task: Task
    ) -> tuple[IntArray, IntArray | None]:
        """Return r_u of each client, [C], and the levels [C] that its codec tries first; None for the codec's own.

        `sizes` computes the sizes of the updates, for an algorithm whose ranks depend on them.
        """

    def check(self, task: Task) -> None:
        """Raise `UserError` if the rank exceeds the embedding dimension, or if the codec does not fit.

        Weights of a network with fewer columns than the rank take the rank that they can.
        """
        if self.codec and self.rows != "touched":
            raise UserError('algorithm.codec sends touched rows; leave out algorithm.rows = "all"')
        for field, stages in {"codec": self.codec, "downlink_codec": self.downlink_codec}.items():
            advice = f"use it with fedmf{' or fedavg' * (field == 'codec')}"
            refuse_stateful(stages, f"the basis of {self.kind} changes in every round; {advice}", field)
        if self.download is not None:
            if not isinstance(task.model, MatrixFactorisation):
                raise UserError(
                    f"algorithm.download: {self.kind} codes the downloads of an item matrix, not of {task.model.kind}; "
                    "use algorithm.downlink_codec"
                )
            self.download.check(self.kind, self.rows, self.downlink_codec)
        check_rank(self.rank, task.model)

    @property
    def traits(self) -> Traits:
        """Uploads of matrix factorisation through a codec have lists of rows."""
        return replace(super().traits, codes_row_lists=bool(self.codec))

    @property
    def row_layout(self) -> RowLayout:
        """The field `rows`."""
        return self.rows

    @property
    def coded_change(self) -> CodedChange:
        """The field `downlink_codec`; the mean of A is coded."""
        return CodedChange(self.downlink_codec)

    def init(self, task: Task) -> Arrays:
        """Return the model's parameters, and A = 0."""
        model = task.initial_parameters()
        zeros, held = self._zeros(model), self.begun_download(model)
        coded = self.coded_change.init({name: values.shape for name, values in zeros.items()}, dtype_of(model))
        return {**model, **_UPDATE.add(zeros), **changed_rows(zeros), **coded, **held}

    # Server half; lines are those of Algorithms 1 and 2, and S_u is the identity in the first

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Send A of the last round and the seed of B, lines 2 to 6; all parameters to a newcomer."""
        model, seed = self.final(server), basis_seed(task.seed, round_index)
        dtype, downlink = dtype_of(model), self.coded_change
        bases = {
            name: draw_basis(self.basis, factor.rank, factor.short, seed, label(name), dtype)
            for name, factor in Factor.all_of(model, self.rank).items()
        }
        if self.download is not None:
            sent = self.download.broadcast(model, server, task, round_index, seed)
            return replace(sent, arrays={**sent.arrays, **BASIS.add(bases)})
        arrays = {**model, **BASIS.add(bases), **downlink.broadcast(seed)}
        coded = downlink.message(server, seed, dtype)
        last = coded or self.payload(_UPDATE.of(server), server.get(CHANGED_ROWS), seed)
        return Broadcast(arrays, self.payload(model, seed=seed), last if round_index > 1 else None)

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Return A = mean of the clients' S_u A_u (line 11), and Q + A B, which every client computes too (line 4).

        A is scaled by the server's learning rate, and as clients decode it; a network's vectors move likewise.
        """
        del task, round_index
        model, bases, sums = self.final(server), BASIS.of(broadcast), TensorSum.of(total)
        kept = {**changed_rows(sums.tensors), **self.kept_download(model, server, broadcast)}
        mean = {name: sums.mean(name) * self.server_learning_rate for name in model}  # in the model's order
        sent, coded = self.coded_change.send(mean, server, broadcast)
        factors = Factor.all_of(model, self.rank)
        changes = {
            name: factors[name].change_of(values, bases[name]) if name in factors else values
            for name, values in sent.items()
        }
        moved = {name: values + changes[name] for name, values in model.items()}
        return {**moved, **_UPDATE.add(sent), **coded, **kept}

    def final(self, server: Arrays) -> Arrays:
        """Return Q, or the network's parameters."""
        if ITEM_FACTORS in server:
            return {ITEM_FACTORS: server[ITEM_FACTORS]}
        return self.coded_change.without(BASIS.without(_UPDATE.without(server)))

    # Client half

    def columns(
        self, broadcast: Arrays, chunk: Chunk, task: Task, rows: RowChanges
    ) -> tuple[BoolArray, IntArray | None]:
        """Choose r_u and levels, and draw S_u, the components of A that each client trains and sends; lines 6, 7."""
        del broadcast
        ranks, levels = self.choose_ranks(partial(self._sizes_of_rows, chunk, task, rows), chunk, task)
        return draw_components(ranks, self.rank, chunk.clients, task.seed, chunk.round_index), levels

    def trained(
        self, broadcast: Arrays, cohort: RowCohort, columns: BoolArray, weights: NDArray[np.float32], *, keep: bool
    ) -> FusedResult:
        """Train p_u and A_u, from A_u = 0 with Q + S_u A_u B, Q and B frozen; lines 8 and 9."""
        item_factors, basis = np.asarray(broadcast[ITEM_FACTORS]), np.asarray(BASIS.of(broadcast)[ITEM_FACTORS])
        return cohort.train_components(item_factors, basis, columns, weights, keep)

    def local_calls(self, broadcast: Arrays, chunk: Chunk, task: Task) -> list[LocalCall] | None:
        """Train each A of a network from zero, and the vectors, with gradients times sqrt(r / d) for each A.

        It is None for matrix factorisation, whose rows have a program of their own.
        """
        model = self.final(broadcast)
        if ITEM_FACTORS in model:
            return None
        factors, masks = Factor.all_of(model, self.rank), self._columns(model, chunk, task).masks
        start = {
            name: np.zeros((factors[name].long, factors[name].rank), dtype_of(model)) if name in factors else values
            for name, values in model.items()
        }
        gains = {
            name: (masks[name] * (factor.rank / factor.short) ** 0.5).astype(model[name].dtype)[:, None, :]
            for name, factor in factors.items()
        }
        frozen = {name: model[name] for name in factors} | BASIS.add(BASIS.of(broadcast))
        terms = LocalTerms(gains=gains, rebuild=FactoredWeights(tuple(factors.items())), frozen=frozen)
        return [LocalCall(start, chunk, task, terms)]

    def message(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> Message:
        """Send A, in the columns that each client trained, and the vectors."""
        if updates.rows:
            return super().message(broadcast, chunk, task, updates)
        return Message(updates.changes, columns=self._columns(self.final(broadcast), chunk, task))

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return A and the vectors, by the clients' examples.

        Each component is divided by the examples of the clients that sent it, or of all clients (`weighted`).
        """
        if arrived.rows:
            return super().contribution(broadcast, chunk, task, arrived)
        weight, counts = tensor_weights("examples", task, chunk), {}
        if self.aggregation != "weighted":
            assert arrived.columns is not None, "message() chose them"
            masks = arrived.columns.masks
            counts = COMPONENT_WEIGHTS.add({name: weight[:, None] * mask for name, mask in masks.items()})
        return Contribution(arrived.tensors, weight, sums=counts)

    def sum_layout(self, task: Task, cohort: int) -> SumLayout:
        """Return the layout of the sum of A, and of the vectors."""
        chosen = self.clients_choose_ranks
        if isinstance(task.model, MatrixFactorisation):
            drawn = self._drawn(ITEM_FACTORS, self.rank) if chosen else None
            return row_columns_layout(self.aggregation, self.rank, task, cohort, drawn)
        model = task.initial_parameters()
        sent, factors = self._zeros(model), Factor.all_of(model, self.rank)
        return tensor_columns_layout(
            {name: values for name, values in sent.items() if name not in factors},
            {name: sent[name] for name in factors},
            *(self.aggregation, task, cohort, self.rank),
            [self._drawn(name, factor.rank) for name, factor in factors.items()] if chosen else None,
        )

    def _drawn(self, name: str, rank: int) -> GroupsOfRanks:
        """Return the function that draws S_u of a weight, of clients of given ranks."""

        def drawn(ranks: IntArray, clients: IntArray, seed: int, round_index: int) -> BoolArray:
            return draw_components(ranks, rank, clients, seed, round_index, label(name))

        return drawn

    def _zeros(self, model: Arrays) -> dict[str, NDArray[Any]]:
        """Return A = 0 of each weight, and vectors of zeros."""
        dtype, factors = dtype_of(model), Factor.all_of(model, self.rank)
        shapes = {name: values.shape for name, values in model.items()}
        shapes |= {name: (factor.long, factor.rank) for name, factor in factors.items()}
        return {name: np.zeros(shape, dtype) for name, shape in shapes.items()}

    def _columns(self, model: Arrays, chunk: Chunk, task: Task) -> Columns:
        """Return r_u of each client of a network, and the components S_u that it trains of each weight."""
        ranks, _ = self.choose_ranks(partial(self._sizes_of_weights, model, len(chunk.clients)), chunk, task)
        masks = {
            name: draw_components(ranks, factor.rank, chunk.clients, task.seed, chunk.round_index, name)
            for name, factor in Factor.all_of(model, self.rank).items()
        }
        return Columns(ranks, masks)

    def _sizes_of_rows(self, chunk: Chunk, task: Task, touched: RowChanges) -> UpdateSizes:
        ranks, rows = np.arange(self.rank + 1), touched.counts.astype(np.float64)
        unexpected = task.data.examples[chunk.clients] if task.training.shared_negatives else touched.counts
        bits = row_bits(touched, ranks[None, :], self.rows, mask=self.aggregation != "weighted")
        return UpdateSizes(
            float_bits=np.broadcast_to(bits, (len(rows), len(ranks))),
            values=rows[:, None] * ranks[1:],
            head_bits=head_bits(task.data.n_items, unexpected),
            rows=rows,
        )

    def _sizes_of_weights(self, model: Arrays, n_clients: int) -> UpdateSizes:
        factors, dtype = Factor.all_of(model, self.rank).values(), dtype_of(model)
        vectors = sum(values.size for values in model.values() if values.ndim < 2)
        bits = [
            dense_wire_bits(vectors + sum(factor.long * min(rank, factor.rank) for factor in factors), dtype)
            for rank in range(self.rank + 1)
        ]
        of_clients = np.broadcast_to(np.array(bits), (n_clients, len(bits)))
        return UpdateSizes(of_clients, values=of_clients[:, 1:] / (8 * dtype.itemsize), head_bits=np.zeros(n_clients))


class CoLR(LowRank):
    """Low-rank changes A B, of which every client trains and sends all r columns of A; B is drawn from a shared seed.

    The server adds mean(A) B to Q. `rank` is r.

    Differs from the paper: 1. the released code's `per_item_mean` is the default aggregation; Algorithm 1's weights
    N_u / N are `weighted`. 2. the row mask that `per_item_mean` needs is sent and paid for. 3. `rows: touched` leaves
    out the rows of A that are zero; `all` sends them, as the paper counts. 4. networks are trained too, each weight
    with a basis of its own; the paper has the item matrix alone.
    """

    clients_choose_ranks: ClassVar[bool] = False

    kind: Literal["colr"] = "colr"

    def choose_ranks(self, sizes: Callable[[], UpdateSizes], chunk: Chunk, task: Task) -> tuple[IntArray, None]:
        """Return r for every client."""
        del sizes, task
        return np.full(len(chunk.clients), self.rank), None


_NORM_BITS = 16.0  # of a column, in bfloat16


class SCoLR(LowRank):
    """CoLR with a rank for each client, which trains and sends r_u of the r_g columns of A.

    The columns are a random subset S_u; the server adds mean(A) B. `rank` is r_g.

    The server regenerates S_u from the run's seed, the round and the client, so that only r_u is sent.

    With `rank_policy: channel` and a codec that quantises, a client's rank and levels follow from the bits that the
    radio gives it (`channel.joint`); `aggregation: per_component_mean` then keeps low ranks from shrinking the mean.

    Differs from the paper: 1.-4. as CoLR. 5. a row is divided by the number of clients that touched it, whichever of
    its components they sent, which reproduces Table 4; Algorithm 2 weights clients by N_u / N (`weighted`).
    """

    clients_choose_ranks: ClassVar[bool] = True

    kind: Literal["scolr"] = "scolr"
    rank: int = Field(8, ge=1, description="r_g, rank of the global update; at most model.embedding_dim")
    rank_policy: Annotated[RankPolicy, RANK_POLICIES] = Field(
        UniformRank(), description="choice of each client's rank in a round"
    )

    def choose_ranks(
        self, sizes: Callable[[], UpdateSizes], chunk: Chunk, task: Task
    ) -> tuple[IntArray, IntArray | None]:
        """Return r_u by the rank policy, [C]; with a budget and a quantiser, the levels [C] that go with it too."""
        known = sizes()
        if self.rank_policy.kind != "channel" or chunk.budget_bits is None:
            profiles, bits = task.profiles.take(chunk.clients), known.float_bits
            return self.rank_policy.ranks(profiles, self.rank, bits, task.seed, chunk.round_index), None
        choices = self._choices(task)
        if choices is None:
            return (known.float_bits[:, 1:] <= chunk.budget_bits[:, None]).sum(axis=1), None
        budget = chunk.budget_bits.astype(np.float64)
        ranks, steps = choices.best(budget, known.values, known.head_bits)
        if known.rows is None:
            return ranks, None
        return ranks, np.maximum(1, np.rint(known.rows**0.5 / steps)).astype(np.int64)

    # What the channel is told before a round

    def rate_distortion(self, task: Task, cohort: IntArray) -> RateDistortion | None:
        """Return the error of each client's update at so many bits, by the rows that it is expected to touch."""
        choices = self._choices(task)
        if self.rank_policy.kind != "channel" or choices is None or not isinstance(task.data, Interactions):
            return None
        heads = head_bits(task.data.n_items, named_rows(task, cohort))
        curves = choices.curves(choices.values_per_rank(self.expected_values(task, cohort)), heads)
        return RateDistortion(np.ceil(curves.min_bits()).astype(np.int64), curves)

    def expected_values(self, task: Task, cohort: IntArray) -> FloatArray:
        """Return the weight of each client's error, [C]: the rows that it is expected to touch, or its examples."""
        if isinstance(task.data, Interactions):
            return expected_rows(task, cohort)
        return np.maximum(task.data.examples[cohort].astype(np.float64), 1.0)

    def _choices(self, task: Task) -> RankLevelGrid | None:
        """Return the joint choices of rank and levels; None for a codec without a quantiser."""
        if Codec(self.codec).levels is None:
            return None
        # Rows that the receiver expects have norms of their own.
        private = isinstance(task.data, Interactions) and not task.training.shared_negatives
        return RankLevelGrid(self.rank, self.rank, _NORM_BITS * (1 if private else 2))
