"""Local steps rating by rating: SGD on a user's factors, and the gradients of the items that it rated.

Reference: Chai et al., Secure Federated Matrix Factorization, IEEE Intelligent Systems 2020 (arXiv:1906.05108), and the
released code.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.local_training.entry_steps import descend_entry_by_entry
from narrowcast.algorithms.local_training.factor_task import FactorChunk, only_masked_factorisation
from narrowcast.algorithms.local_training.factor_training import FactorTraining
from narrowcast.algorithms.local_training.factor_updates import Factors, FactorUpdates, finite_updates
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.rating_matrix import RatingMatrix
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.masked_factorisation import COLUMN_FACTORS
from narrowcast.platform.types import BoolArray, Chunk


class RatingSGD(FactorTraining):
    """One SGD step on h_j at each rating in the order of time, and one gradient step of w_i at the h_j after that.

    With e = x - w_i . h_j: h_j -= lr (-2 e w_i + 2 wd h_j), then w_i is to move by -lr (-2 e h_j + 2 wd w_i), where w_i
    stays that of the server. h_j is not projected.

    Differs from the paper: 1. as in the released code, the gradient of w_i has the new h_j.
    """

    kind: Literal["rating_sgd"] = "rating_sgd"
    learning_rate: float = Field(1e-3, gt=0, allow_inf_nan=False, description="step size")
    weight_decay: float = Field(
        1e-4, ge=0, allow_inf_nan=False, description="coefficient of the squared norms of h_j and w_i in each step"
    )

    @property
    def epochs(self) -> int:
        """1: each rating once."""
        return 1

    def check(self, task: Task) -> None:
        """Raise `UserError` unless the model is a factorisation of a partly observed matrix without a set for H."""
        only_masked_factorisation(self.kind, task)
        if task.model.h_set.kind != "none":  # type: ignore[attr-defined]
            raise UserError(f"training.kind = {self.kind} does not project H; leave out model.h_set")

    def train_factors(
        self, row_factors: Factors, chunk: Chunk, task: Task[RatingMatrix, RatingSGD], moves: BoolArray
    ) -> FactorUpdates:
        """Train H of all clients of a chunk, and return the steps of W of those that `moves` names, [C]."""
        here = FactorChunk.of(row_factors, chunk, task, moves)
        columns = np.array(chunk.state[COLUMN_FACTORS], dtype=row_factors.dtype)
        loss, changes = np.empty(len(chunk.clients)), here.no_changes()
        descend_entry_by_entry(
            here.entries,
            self.learning_rate,
            self.weight_decay,
            columns,
            loss,
            moves,
            here.change_starts,
            changes,
        )
        examples = task.data.examples[chunk.clients]
        finite = finite_updates(here.change_starts, changes, columns, loss)
        return FactorUpdates(here.change_starts, here.change_rows, changes, columns, loss, examples, examples, finite)
