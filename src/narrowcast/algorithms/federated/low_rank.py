"""Common part of CoLR and SCoLR: hyper-parameters, state, and the choice of the form for the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from narrowcast.algorithms.codecs.random_basis import BasisKind
from narrowcast.algorithms.codecs.rows import RowLayout
from narrowcast.algorithms.codecs.stages import Stages, refuse_stateful
from narrowcast.algorithms.federated.coded_change import CodedChange
from narrowcast.algorithms.federated.coded_download import Download, SizesDownloads
from narrowcast.algorithms.federated.factorisation_checks import check_rank
from narrowcast.algorithms.federated.low_rank_form import LowRankForm, UpdateSizes
from narrowcast.algorithms.federated.low_rank_network import NetworkForm
from narrowcast.algorithms.federated.low_rank_rows import RowForm
from narrowcast.algorithms.federated.server_learning_rate import ServerLearningRate
from narrowcast.algorithms.federated.sum_layout import SumLayout
from narrowcast.algorithms.uploads.partial_sums import Aggregation, add_up
from narrowcast.platform.contracts import Broadcast, LocalCall, Task, Traits
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.matrix_factorisation import ITEM_FACTORS, MatrixFactorisation
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, IntArray, LocalUpdates


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
