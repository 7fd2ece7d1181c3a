"""Common part of algorithms whose clients keep the factors of their columns and send changes of the rows' factors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.rows import RowLayout
from narrowcast.algorithms.codecs.stages import Stages
from narrowcast.algorithms.federated.coded_download import Download, SizesDownloads
from narrowcast.algorithms.federated.sum_layout import Group, Part, SumLayout
from narrowcast.algorithms.federated.whole_model import model_of
from narrowcast.algorithms.uploads.factor_uploads import FactorUploads
from narrowcast.algorithms.uploads.partial_sums import TENSORS, WEIGHT, TensorSum, add_up
from narrowcast.platform.contracts import Broadcast, Task, Traits
from narrowcast.platform.errors import UserError
from narrowcast.platform.kinds import optional
from narrowcast.platform.models.masked_factorisation import ROW_FACTORS, MaskedFactorisation
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, FloatArray


class FactorAveraging(SizesDownloads, BaseModel, ABC):
    """The server holds W [N, K]; a subclass says who sends with which weights, and how W moves by the sum."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: RowLayout = "all"
    codec: Stages = ()
    download: Download = None

    @property
    def traits(self) -> Traits:
        """Clients train factors."""
        return replace(super().traits, trains_factors=True)

    @abstractmethod
    def sending_weights(self, chunk: Chunk, task: Task) -> FloatArray:
        """Return the weights of the chunk's clients in the sum, [C]; 0 for one that does not send."""

    @abstractmethod
    def moved(self, row_factors: Arrays, total: TensorSum) -> Arrays:
        """Return W after the step by the sum of the changes, before it is projected."""

    def check(self, task: Task) -> None:
        """Raise `UserError` for another model or training, and for rows that cannot be sent in its type."""
        if not isinstance(task.model, MaskedFactorisation) or optional(task.training, "train_factors") is None:
            raise UserError(
                f"algorithm.kind = {self.kind} trains masked_factorisation by alternating_gradient or rating_sgd, not "
                f"{task.model.kind} by {task.training.kind}; use data.kind = explicit_ratings or sample_columns"
            )
        if self.rows == "touched" and task.model.dtype == "float64":
            raise UserError("algorithm.rows = touched sends float32; use model.dtype = float32, or rows = all")
        if self.download is not None and self.download.rows == "touched":
            raise UserError(
                f"algorithm.download.rows = touched asks for rows of items, which {self.kind} does not; "
                "use download.rows = all"
            )

    @property
    def _uploads(self) -> FactorUploads:
        return FactorUploads(Codec(self.codec), self.rows)

    def init(self, task: Task) -> Arrays:
        """Return W, and what downloads on a grid need."""
        model = task.initial_parameters()
        return {**model, **self.begun_download(model)}

    def init_clients(self, task: Task) -> Arrays:
        """Return H [U, n, K], and the codec's state."""
        clients = task.model.init_clients(task.data, task.private_seed.value)
        state = self._uploads.init_state(task.data.n_clients, np.asarray(task.initial_parameters()[ROW_FACTORS]))
        return {**clients, **state} if self.codec else clients

    # Server half

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Send W to every client of the round, or W on a grid."""
        return self.broadcast_model(model_of(server), server, task, round_index)

    def fold(self, partials: Sequence[Arrays]) -> Arrays:
        """Add up the chunks' sums."""
        return add_up(partials)

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Return the projection of the moved W onto its set; W as it is if nobody sent."""
        del round_index
        model, sums = model_of(server), TensorSum.of(total)
        held = self.kept_download(model, server, broadcast)
        if not sums.weight:
            return {**model, **held}
        moved = np.asarray(self.moved(model, sums)[ROW_FACTORS], dtype=model[ROW_FACTORS].dtype)
        return {ROW_FACTORS: task.model.w_set.project_w(moved), **held}  # type: ignore[attr-defined]

    def final(self, server: Arrays) -> Arrays:
        """Return W."""
        return model_of(server)

    def layout_of(self, task: Task, cohort: int, most_weight: int) -> SumLayout:
        """Return the layout of the sum of W's changes, of a total weight up to `most_weight`.

        Raise `UserError` for some rows, whose list would tell what encryption is to hide.
        """
        if self.rows == "touched":
            raise UserError("secure: algorithm.rows = touched names the items of each client; use algorithm.rows = all")
        w, name = np.asarray(task.initial_parameters()[ROW_FACTORS]), TENSORS.name(ROW_FACTORS)
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {name: (w.shape, w.dtype), WEIGHT: ((), np.float64)}
        group = Group((Part(name, None, w.size),), (Part(WEIGHT, None, 1),))
        return SumLayout((group,), shapes, most_weight, cohort, one_weight=True)

    # Client half

    def train(self, broadcast: Arrays, chunk: Chunk, task: Task) -> ChunkResult:
        """Train the chunk's clients on their columns, and send the changes of W of those that have a weight."""
        row_factors, weights = np.asarray(model_of(broadcast)[ROW_FACTORS]), self.sending_weights(chunk, task)
        updates = task.training.train_factors(row_factors, chunk, task, weights > 0)
        return self._uploads.send(chunk, task, row_factors, updates, weights)
