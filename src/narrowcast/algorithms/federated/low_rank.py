"""Common part of CoLR and SCoLR: hyper-parameters, state, and the choice of the form for the model.

CoLR: updates of low rank in a random basis B that all clients of a round share and regenerate from a seed.

Reference: Nguyen et al., Towards Efficient Communication and Secure Federated Recommendation System via Low-rank
Training, WWW 2024 (arXiv:2401.03748), section 4.3 and Algorithm 1. Letters: Q [N, d], A [N, r], B [r, d]; the paper
writes their transposes.

SCoLR: CoLR in which every client trains and sends as many components as its link affords.

Reference: Nguyen et al., WWW 2024 (arXiv:2401.03748), section 4.4, equation 6 and Algorithm 2. The authors released no
code for it; with `per_item_mean` and `rank_policy: uniform` this one reproduces their Table 4. Letters: as in `colr`;
r_g is the rank of the global update, r_u that of client u's, S_u the components that it trains.

CoLR and SCoLR of matrix factorisation: low-rank changes A B of the item matrix Q.

Letters: Q [N, d], A [N, r], B [r, d]. The paper writes the transposes: Q [d, N], B [d, r], A [r, N].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from narrowcast.algorithms.channel.joint import Choices, head_bits
from narrowcast.algorithms.client.row_uploads import RowSending, float_bits, row_coding, train_and_send_rows
from narrowcast.algorithms.client.sums import (
    ROWS,
    WEIGHT,
    Aggregation,
    Group,
    Part,
    RowSum,
    SumLayout,
    add_up,
    row_sum_layout,
)
from narrowcast.algorithms.codecs.chain import Codec, Stages, refuse_stateful
from narrowcast.algorithms.codecs.low_rank import BasisKind, draw_basis
from narrowcast.algorithms.codecs.messages import RowLayout, RowsPayload
from narrowcast.algorithms.federated.downloads import (
    CodedChange,
    Download,
    SizesDownloads,
    before_requests,
    with_requests,
)
from narrowcast.algorithms.federated.fedavg import ServerLearningRate
from narrowcast.algorithms.federated.fedmf import check_rank, expected_rows, named_rows
from narrowcast.algorithms.federated.low_rank_networks import NetworkForm
from narrowcast.algorithms.federated.shared_basis import (
    RANK_POLICIES,
    LowRankForm,
    RankPolicy,
    UniformRank,
    UpdateSizes,
    basis_seed,
    draw_components,
)
from narrowcast.algorithms.local_training.factorisation import RowCohort
from narrowcast.platform.contracts import Broadcast, LocalCall, RateDistortion, Task, Traits
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.factorisation import ITEM_FACTORS, MatrixFactorisation
from narrowcast.platform.types import Arrays, BoolArray, Chunk, ChunkResult, FloatArray, IntArray, LocalUpdates, Payload

if TYPE_CHECKING:
    pass

_BASIS, _UPDATE, _CHANGED = "basis", "update", "changed_rows"


@dataclass(frozen=True)
class RowForm:
    """Low-rank changes of Q: clients send the touched rows of A."""

    algorithm: LowRank

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

    def train(self, broadcast: Arrays, chunk: Chunk, task: Task) -> ChunkResult:
        """Train r_u components of A on each client with Q and B frozen, and send them."""
        algorithm = self.algorithm
        cohort = RowCohort.draw(before_requests(algorithm.download, chunk), task)
        ranks, levels = algorithm.choose_ranks(partial(self._sizes, cohort), cohort.chunk, task)
        components = draw_components(ranks, algorithm.rank, chunk.clients, task.seed, chunk.round_index)
        coding = row_coding(Codec(algorithm.codec), algorithm.rows, levels)
        sending = RowSending(algorithm.aggregation, algorithm.rows, coding)
        item_factors, basis = np.asarray(broadcast[ITEM_FACTORS]), np.asarray(broadcast[_BASIS])
        train = partial(cohort.train_components, item_factors, basis, components)
        result = train_and_send_rows(sending, cohort, components, train)
        return with_requests(algorithm.download, cohort, result)

    def local_call(self, broadcast: Arrays, chunk: Chunk, task: Task) -> LocalCall | None:
        """Return None: rows are trained and summed by one program."""
        del broadcast, chunk, task
        return None

    def upload(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> ChunkResult:
        """Raise: `local_call` returns nothing to send."""
        raise NotImplementedError("rows are trained and sent by train()")

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
            Group((Part(ROWS, each, n_items),), (Part(WEIGHT, each, n_items),) if by_component else ())
            for each in range(algorithm.rank)
        ]
        shared = () if by_component else (Group((), whole.groups[0].counts),)

        def groups_of_ranks(ranks: IntArray, clients: IntArray, seed: int, round_index: int) -> BoolArray:
            own = draw_components(ranks, algorithm.rank, clients, seed, round_index)
            return np.hstack([own.any(axis=1, keepdims=True)] * len(shared) + [own])

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


class LowRank(SizesDownloads, BaseModel, ABC):
    """Changes of low rank in a basis that all clients of a round share.

    The item matrix of matrix factorisation is handled by `RowForm`, the weights of a network by `NetworkForm`. With
    `download` clients are sent Q itself, as `CodedDownload` says, in place of the last round's mean of A.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    clients_choose_ranks: ClassVar[bool]

    kind: str
    rank: int = Field(4, ge=1, description="rank of the global update; at most model.embedding_dim")
    basis: BasisKind = "orthonormal"
    aggregation: Aggregation = "per_item_mean"
    rows: RowLayout = "touched"
    codec: Stages = ()
    downlink_codec: Stages = Field((), description="codec of the mean of A on its way to clients that follow")
    server_learning_rate: ServerLearningRate = 1.0
    download: Download = None

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

    def form(self, arrays: Arrays) -> LowRankForm:
        """Return the form for the model whose parameters are among `arrays`: a server state or a broadcast."""
        return RowForm(self) if ITEM_FACTORS in arrays else NetworkForm(self)

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

    def init(self, task: Task) -> Arrays:
        """Return the model's parameters, and A = 0."""
        model = task.initial_parameters()
        return self.form(model).init(model)

    def init_clients(self, task: Task) -> Arrays:
        """Return the private parameters of all clients, such as the user factors P [U, d]."""
        return task.model.init_clients(task.data, task.private_seed.value)

    # Server half; lines are those of Algorithms 1 and 2, and S_u is the identity in the first

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Send A of the last round and the seed of B, lines 2 to 6; Q itself to a newcomer."""
        return self.form(server).broadcast(server, task, round_index)

    def fold(self, partials: Sequence[Arrays]) -> Arrays:
        """Add up the chunks' sums."""
        return add_up(partials)

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Return A = mean of the clients' S_u A_u (line 11), and Q + A B, which every client computes too (line 4)."""
        del task, round_index
        return self.form(server).step(server, broadcast, total)

    def final(self, server: Arrays) -> Arrays:
        """Return Q, or the network's parameters."""
        return self.form(server).final(server)

    # Client half

    def train(self, broadcast: Arrays, chunk: Chunk, task: Task) -> ChunkResult:
        """Choose r_u, draw S_u, train p_u and A_u, from A_u = 0 with Q + S_u A_u B, and send A_u: lines 6 to 9."""
        return self.form(broadcast).train(broadcast, chunk, task)

    def local_call(self, broadcast: Arrays, chunk: Chunk, task: Task) -> LocalCall | None:
        """Return the local training of a network; None for matrix factorisation, which has a program of its own."""
        return self.form(broadcast).local_call(broadcast, chunk, task)

    def upload(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> ChunkResult:
        """Send what the clients of a network trained."""
        return self.form(broadcast).upload(broadcast, chunk, task, updates)

    def sum_layout(self, task: Task, cohort: int) -> SumLayout:
        """Return the layout of the sum of A."""
        rows = isinstance(task.model, MatrixFactorisation)
        return (RowForm(self) if rows else NetworkForm(self)).sum_layout(task, cohort)


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
        curves = choices.curves(choices.of_rows(self.expected_values(task, cohort)), heads)
        return RateDistortion(np.ceil(curves.min_bits()).astype(np.int64), curves)

    def expected_values(self, task: Task, cohort: IntArray) -> FloatArray:
        """Return the weight of each client's error, [C]: the rows that it is expected to touch, or its examples."""
        if isinstance(task.data, Interactions):
            return expected_rows(task, cohort)
        return np.maximum(task.data.examples[cohort].astype(np.float64), 1.0)

    def _choices(self, task: Task) -> Choices | None:
        """Return the joint choices of rank and levels; None for a codec without a quantiser."""
        if Codec(self.codec).levels is None:
            return None
        # Rows that the receiver expects have norms of their own.
        private = isinstance(task.data, Interactions) and not task.training.shared_negatives
        return Choices(self.rank, self.rank, _NORM_BITS * (1 if private else 2))
