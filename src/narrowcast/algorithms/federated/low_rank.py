"""CoLR and SCoLR: updates of low rank in a random basis B that all clients of a round share and regenerate from a seed.

Reference: Nguyen et al., Towards Efficient Communication and Secure Federated Recommendation System via Low-rank
Training, WWW 2024 (arXiv:2401.03748), section 4.3 and Algorithm 1. Letters: Q [N, d], A [N, r], B [r, d]; the paper
writes their transposes.

SCoLR is CoLR in which every client trains and sends as many components as its link affords: section 4.4, equation 6 and
Algorithm 2. The authors released no code for it; with `per_item_mean` and `rank_policy: uniform` this one reproduces
their Table 4. Letters: r_g is the rank of the global update, r_u that of client u's, S_u the components that it trains.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.channel.joint import RankLevelGrid, head_bits
from narrowcast.algorithms.client.client_pass import Arrived, ClientPass, Contribution
from narrowcast.algorithms.client.row_uploads import RowCall
from narrowcast.algorithms.client.sums import SumLayout
from narrowcast.algorithms.client.uploads import Message
from narrowcast.algorithms.codecs.chain import Codec, refuse_stateful
from narrowcast.algorithms.federated.fedmf import RowAveraging, check_rank, expected_rows, named_rows
from narrowcast.algorithms.federated.low_rank_forms import LowRankSettings, NetworkForm, RowForm
from narrowcast.algorithms.federated.shared_basis import (
    RANK_POLICIES,
    RankPolicy,
    UniformRank,
    UpdateSizes,
)
from narrowcast.algorithms.local_training.factorisation import RowCohort
from narrowcast.platform.contracts import Broadcast, LocalCall, RateDistortion, Task, Traits
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.factorisation import ITEM_FACTORS, MatrixFactorisation
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, FloatArray, IntArray, LocalUpdates


class LowRank(LowRankSettings, ABC):
    """Changes of low rank in a basis that all clients of a round share.

    The item matrix of matrix factorisation is handled by `RowForm`, the weights of a network by `NetworkForm`. With
    `download` clients are sent Q itself, as `CodedDownload` says, in place of the last round's mean of A.
    """

    def form(self, arrays: Arrays) -> RowForm | NetworkForm:
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
        rows = isinstance(self.form(broadcast), RowForm)
        return (RowAveraging if rows else ClientPass).train(self, broadcast, chunk, task)

    def row_call(self, broadcast: Arrays, cohort: RowCohort) -> RowCall:
        """Return the training of components of A on the rows of Q."""
        return RowForm(self).row_call(broadcast, cohort)

    def local_calls(self, broadcast: Arrays, chunk: Chunk, task: Task) -> list[LocalCall] | None:
        """Return the local training of a network; None for matrix factorisation, which has a program of its own."""
        form = self.form(broadcast)
        return None if isinstance(form, RowForm) else [form.local_call(broadcast, chunk, task)]

    def message(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> Message:
        """Send what the clients of a network trained."""
        return NetworkForm(self).message(broadcast, chunk, task, updates)

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return what the clients of a network trained, by their examples."""
        return NetworkForm(self).contribution(broadcast, chunk, task, arrived)

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
