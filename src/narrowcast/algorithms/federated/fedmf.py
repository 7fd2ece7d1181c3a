"""FedMF: federated averaging of the whole item matrix Q [N, d]. The kind `fedmf` is not Chai's secure protocol.

`RowAveraging` is the averaging of rows that CoLR, SCoLR and adaptive SVD extend too.

Reference: Chai et al., Secure Federated Matrix Factorization, IEEE Intelligent Systems 2020; McMahan et al., AISTATS
2017. The baseline of Nguyen et al., WWW 2024 (arXiv:2401.03748).
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.client.client_pass import Arrived, ClientPass, Contribution
from narrowcast.algorithms.client.sums import (
    WEIGHT,
    Aggregation,
    SumLayout,
    Summand,
    TensorSum,
    row_sum_layout,
    row_weights,
)
from narrowcast.algorithms.client.uploads import Message, Uploads, init_codec_state, row_bits
from narrowcast.algorithms.codecs.chain import Stages
from narrowcast.algorithms.codecs.messages import LIKELY, WHOLE, DensePayload, LikelyRows, RowLayout, RowsPayload
from narrowcast.algorithms.codecs.sparsify import nonzero_rows
from narrowcast.algorithms.federated.downloads import (
    CodedChange,
    Download,
    SizesDownloads,
    charge_requests,
    reserve_request_header,
)
from narrowcast.algorithms.federated.fedavg import ServerLearningRate
from narrowcast.algorithms.local_training.factorisation import RowCohort
from narrowcast.algorithms.local_training.factorisation_kernels import FusedResult
from narrowcast.algorithms.local_training.negatives import SharedNegatives
from narrowcast.platform.contracts import Broadcast, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.factorisation import MatrixFactorisation
from narrowcast.platform.models.model import ITEM_FACTORS, USER_FACTORS
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.traits import Traits
from narrowcast.platform.types import Arrays, BoolArray, Chunk, FloatArray, IntArray, LocalUpdates, Payload, RowChanges


def only_factorisation(kind: str, task: Task, instead: str = "fedavg, colr or scolr") -> None:
    """Raise `UserError` if the model is not matrix factorisation."""
    if not isinstance(task.model, MatrixFactorisation):
        raise UserError(f'algorithm.kind = "{kind}" trains matrix_factorisation, not {task.model.kind}; use {instead}')


def check_rank(rank: int, model: object) -> None:
    """Raise `UserError` if the rank exceeds the embedding dimension; other models take the rank that they can."""
    if isinstance(model, MatrixFactorisation) and rank > model.embedding_dim:
        raise UserError(
            f"algorithm.rank = {rank} is above model.embedding_dim = {model.embedding_dim}; "
            f"use a rank of 1 to {model.embedding_dim}, or a larger embedding_dim"
        )


def expected_rows(task: Task, cohort: IntArray) -> FloatArray:
    """Return the expected number of rows that each client of a cohort touches, [C]: positives and drawn negatives."""
    positives = task.data.examples[cohort].astype(np.float64)
    drawn = task.data.n_items * -np.expm1(-positives * task.training.negatives / task.data.n_items)
    return positives + drawn * (1 - positives / task.data.n_items)


def named_rows(task: Task, cohort: IntArray) -> FloatArray:
    """Return the expected number of rows that each client of a cohort names, [C]: all of them, or its positives alone.

    With shared negatives the receiver expects the others.
    """
    if task.training.shared_negatives:
        return np.asarray(task.data.examples[cohort], dtype=np.float64)
    return expected_rows(task, cohort)


CHANGED_ROWS = "changed_rows"
"""The rows that the last round changed, in a server state; [N]."""


def changed_rows(change: Arrays) -> dict[str, BoolArray]:
    """Return which rows of the item matrix a change has, as an entry of the server state; none for a network."""
    return {CHANGED_ROWS: nonzero_rows(change[ITEM_FACTORS])} if ITEM_FACTORS in change else {}


class RowAveraging(SizesDownloads, ClientPass, ABC):
    """An algorithm whose clients train the rows of Q that they touch, and send their changes; the server adds means.

    Without a codec the size of an upload is known before the training, which then adds up the changes of the clients
    whose uploads will arrive, while they are in the processor's cache, and keeps none of them; unless a subclass has
    attackers, which `tamper` with them.
    """

    aggregation: Aggregation = "per_item_mean"
    server_learning_rate: ServerLearningRate = 1.0
    download: Download = None

    @property
    def row_layout(self) -> RowLayout:
        """The rows that clients send, and the server to those that follow: those that changed, or all."""
        return "touched"

    @property
    def coded_change(self) -> CodedChange:
        """The coding of the mean change, by which the server moves its model too: none."""
        return CodedChange(())

    def init(self, task: Task) -> Arrays:
        """Return Q, and the rows that the last round changed: none."""
        server = task.initial_parameters()
        shape = np.shape(server[ITEM_FACTORS])
        changed = changed_rows({ITEM_FACTORS: np.zeros(shape)})
        return {**server, **changed, **self.coded_change.init({WHOLE: shape}), **self.begun_download(server)}

    def init_clients(self, task: Task) -> Arrays:
        """Return the private parameters of all clients, such as the user factors P [U, d], and the codec's state."""
        clients = task.model.init_clients(task.data, task.private_seed.value)
        if not any(stage.remembers for stage in self.codec):
            return clients
        rows = np.broadcast_to(np.float32(0), (task.data.n_items, clients[USER_FACTORS].shape[1]))
        return {**clients, **init_codec_state(self.codec, task.data.n_clients, {LIKELY: rows})}

    # Server half

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Send Q; to a client that holds the last round's, its changed rows, or the last change as it was coded."""
        model, coded = self.final(server), self.coded_change
        if self.download is not None:
            return self.download.broadcast(model, server, task, round_index)
        last = coded.message(server) or self.payload(model, server[CHANGED_ROWS])
        arrays = {**model, **coded.broadcast(task.seed, round_index)}
        return Broadcast(arrays, self.payload(model), last if round_index > 1 else None)

    def payload(self, model: Arrays, changed: BoolArray | None = None, seed: int | None = None) -> Payload:
        """Return the message of a model or of a change; of an item matrix the rows `changed` [N], None for all."""
        if ITEM_FACTORS not in model:
            return DensePayload.of(model, seed=seed)
        values = np.asarray(model[ITEM_FACTORS])
        if changed is None:
            return RowsPayload(len(values), np.arange(len(values)), values, "all", mask=False, seed=seed)
        rows = np.flatnonzero(changed)
        return RowsPayload(len(values), rows, values[rows], self.row_layout, mask=False, seed=seed)

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Return Q plus the mean change, or plus its decoded downlink coding, at the server's learning rate.

        If no client delivered, Q stays: what the downlink's error feedback remembers waits for the next change.
        """
        del task, round_index
        model, sums = self.final(server), TensorSum.of(total)
        kept = {**changed_rows(sums.tensors), **self.kept_download(model, server, broadcast)}
        if not sums.weight.any():
            return {**server, **self.coded_change.idle(server), **kept}
        mean = sums.mean(ITEM_FACTORS) * self.server_learning_rate
        change, coded = self.coded_change.send({WHOLE: mean}, server, broadcast)
        return {ITEM_FACTORS: np.asarray(model[ITEM_FACTORS]) + change[WHOLE], **coded, **kept}

    def final(self, server: Arrays) -> Arrays:
        """Return Q."""
        return {ITEM_FACTORS: server[ITEM_FACTORS]}

    # Client half

    def columns(
        self, broadcast: Arrays, chunk: Chunk, task: Task, rows: RowChanges
    ) -> tuple[BoolArray, IntArray | None]:
        """Return the columns of the rows that each client trains and sends, [C, k], and the levels of its codec: all.

        Levels [C] are those that the codec tries first, None for its own.
        """
        del task, rows
        return np.ones((len(chunk.clients), np.shape(broadcast[ITEM_FACTORS])[1]), dtype=bool), None

    def trained(
        self, broadcast: Arrays, cohort: RowCohort, columns: BoolArray, weights: NDArray[np.float32], *, keep: bool
    ) -> FusedResult:
        """Train p_u and whole rows of Q; add up the changes times the weights [C], and keep them too if asked to."""
        del columns
        return cohort.train_rows(np.asarray(broadcast[ITEM_FACTORS]), weights, keep)

    def local_updates(self, broadcast: Arrays, chunk: Chunk, task: Task) -> list[LocalUpdates]:
        """Train the rows that the chunk's clients touch."""
        if ITEM_FACTORS not in broadcast:
            return list(super().local_updates(broadcast, chunk, task))
        if self.codec or self.claims_otherwise(task):
            return [self.each_update(broadcast, chunk, task)]
        limited = reserve_request_header(self.download, chunk)
        cohort = RowCohort.draw(limited, task)
        columns, levels = self.columns(broadcast, limited, task, cohort.rows)
        message = self._message(limited, task, replace(cohort.rows, columns=columns))
        weights = row_weights(self.aggregation, task, chunk) * (message.fits(limited, task) & limited.arrives())
        return [cohort.updates(self.trained(broadcast, cohort, columns, weights, keep=False), columns, levels)]

    def each_update(self, broadcast: Arrays, chunk: Chunk, task: Task) -> LocalUpdates:
        """Train as `local_updates` does, and keep the changes of each client."""
        if ITEM_FACTORS not in broadcast:
            return super().each_update(broadcast, chunk, task)
        limited = reserve_request_header(self.download, chunk)
        cohort = RowCohort.draw(limited, task)
        columns, levels = self.columns(broadcast, limited, task, cohort.rows)
        nothing = np.zeros(len(columns), dtype=np.float32)
        return cohort.updates(self.trained(broadcast, cohort, columns, nothing, keep=True), columns, levels)

    def message(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> Message:
        """Send the rows, each client in its own columns."""
        del broadcast
        return self._message(chunk, task, updates.rows[ITEM_FACTORS], updates.levels)

    def _message(self, chunk: Chunk, task: Task, rows: RowChanges, levels: IntArray | None = None) -> Message:
        likely = None
        if self.codec and task.training.shared_negatives:
            likely = partial(likely_rows, chunk, task)
        return Message(
            sends=np.ones(len(chunk.clients), dtype=bool),
            levels=levels,
            rows={ITEM_FACTORS: rows},
            layout=self.row_layout,
            mask=self.aggregation != "weighted",
            likely=likely,
        )

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return the rows, and what their sum is divided by."""
        del broadcast
        rows, weight = arrived.rows[ITEM_FACTORS], row_weights(self.aggregation, task, chunk)
        if self.aggregation == "weighted":
            counts: Summand = task.data.examples[chunk.clients].astype(np.float64)[:, None, None]
        elif self.aggregation == "per_item_mean":
            known = None if rows.touched is None else rows.touched[:, None]
            counts = replace(rows, values=np.ones((len(rows.rows), 1)), total=known)
        else:
            assert rows.columns is not None, "local_updates() chose them"
            counts = replace(rows, values=rows.columns[rows.owners].astype(np.float64), total=None)
        return Contribution({ITEM_FACTORS: rows}, weight, sums={WEIGHT: counts})

    def contributed(
        self, broadcast: Arrays, chunk: Chunk, task: Task, trained: LocalUpdates
    ) -> tuple[Contribution, Uploads]:
        """Send the rows, and measure them in float32 with all columns."""
        contribution, uploads = super().contributed(broadcast, chunk, task, trained)
        if not trained.rows:
            return contribution, uploads
        whole = np.array(np.shape(broadcast[ITEM_FACTORS])[1])
        bits = row_bits(trained.rows[ITEM_FACTORS], whole, "touched", mask=self.aggregation != "weighted")
        return contribution, replace(uploads, touched_bits=int(bits.sum()))

    def send(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: Sequence[LocalUpdates]) -> ChunkResult:
        """Send each client's rows within its budget, with its request for rows if it made one."""
        limited = reserve_request_header(self.download, chunk)
        result = super().send(broadcast, limited, task, updates)
        return charge_requests(self.download, limited, updates[0].rows.get(ITEM_FACTORS), result)


def likely_rows(chunk: Chunk, task: Task, index: int) -> LikelyRows:
    """Return the rows that the receiver expects of the client at a place of the chunk."""
    return SharedNegatives.of(task, int(chunk.clients[index]), chunk.round_index).likely_rows


class FedMF(RowAveraging):
    """Federated averaging of item factors: each client trains and sends the rows of Q that it touches.

    The server adds the mean change of each row.

    With `rows: all` a `codec` sees the client's whole change, zeros included, and with `downlink_codec` Q moves by the
    decoded mean change; `error_feedback` there is the server's. Both with the same `svd` or `top_k` are the baselines
    of the paper's Fig. 4 as in its released code: each row of the sum is divided by the clients that touched it,
    whatever Top-K left of theirs. `download` is the other way down: Q itself on a grid, see `CodedDownload`.

    Differs from the paper: 1. the released code's `per_item_mean` is the default aggregation; Algorithm 1's weights are
    `weighted`. 2. `rows: touched` sends only the changed rows; `all` sends zeros too, as the paper counts.
    """

    kind: Literal["fedmf"] = "fedmf"
    rows: RowLayout = "touched"
    downlink_codec: Stages = Field((), description="chain of codec stages for the server's update")

    @property
    def row_layout(self) -> RowLayout:
        """The field `rows`."""
        return self.rows

    @property
    def coded_change(self) -> CodedChange:
        """The field `downlink_codec`."""
        return CodedChange(self.downlink_codec)

    def check(self, task: Task) -> None:
        """Raise `UserError` for models other than matrix factorisation, and for whole matrices in stateful codecs."""
        only_factorisation(self.kind, task)
        if self.download is not None:
            self.download.check(self.kind, self.rows, self.downlink_codec)
        if self.rows == "all" and (remembers := [stage.kind for stage in self.codec if stage.remembers]):
            raise UserError(
                f"algorithm.codec has {remembers[0]}, which keeps client state; use algorithm.rows = touched"
            )

    @property
    def traits(self) -> Traits:
        """Uploads have lists of rows if they are touched rows through a codec."""
        lists = bool(self.codec) and self.rows == "touched"
        return replace(super().traits, codes_row_lists=lists)

    def sum_layout(self, task: Task, cohort: int) -> SumLayout | None:
        """Return the layout of the sum of the changes of Q."""
        if not isinstance(task.model, MatrixFactorisation):
            return None
        return row_sum_layout(self.aggregation, task.model.embedding_dim, task, cohort)
