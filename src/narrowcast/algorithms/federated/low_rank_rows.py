"""CoLR and SCoLR of matrix factorisation: low-rank changes A B of the item matrix Q.

Letters: Q [N, d], A [N, r], B [r, d]. The paper writes the transposes: Q [d, N], B [d, r], A [r, N].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from narrowcast.algorithms.channel.joint import head_bits
from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.random_basis import draw_basis
from narrowcast.algorithms.codecs.rows import RowsPayload
from narrowcast.algorithms.federated.coded_download import before_requests, with_requests
from narrowcast.algorithms.federated.low_rank_form import UpdateSizes
from narrowcast.algorithms.federated.shared_basis import basis_seed, draw_components
from narrowcast.algorithms.federated.sum_layout import Group, Part, SumLayout, row_sum_layout
from narrowcast.algorithms.local_training.cohort import RowCohort
from narrowcast.algorithms.uploads.partial_sums import ROWS, WEIGHT, RowSum
from narrowcast.algorithms.uploads.row_uploads import RowSending, float_bits, row_coding, train_and_send_rows
from narrowcast.platform.contracts import Broadcast, LocalCall, Task
from narrowcast.platform.models.matrix_factorisation import ITEM_FACTORS
from narrowcast.platform.types import Arrays, BoolArray, Chunk, ChunkResult, IntArray, LocalUpdates, Payload

if TYPE_CHECKING:
    from narrowcast.algorithms.federated.low_rank import LowRank

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
