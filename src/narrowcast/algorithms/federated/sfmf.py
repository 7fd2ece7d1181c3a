"""SFMF: federated matrix factorisation by gradients of the item factors, which can be sent encrypted.

Reference: Chai et al., Secure Federated Matrix Factorization, IEEE Intelligent Systems 2020 (arXiv:1906.05108), and the
released code (Di-Chai/FedMF). The kind `fedmf` is the averaging of item matrices that is named after this paper.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from narrowcast.algorithms.federated.factor_averaging import FactorAveraging
from narrowcast.algorithms.federated.sum_layout import SumLayout
from narrowcast.algorithms.uploads.partial_sums import TensorSum
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.masked_factorisation import ROW_FACTORS
from narrowcast.platform.types import Arrays, Chunk, FloatArray


class SFMF(FactorAveraging):
    """Gradients of the items' factors from the users, added up under encryption: W -= sum of the users' gradients.

    Users take an SGD step on their own factors at each of their ratings, and send the gradients of the items that they
    rated; see `training.kind: rating_sgd`. With `rows: all`, the paper's FullText, a user sends the gradients of all
    items, zeros included. With `rows: touched`, PartText, it sends those of its items alone, which tells the server
    which items it rated, under encryption too. `secure` encrypts the sum with `rows: all`.
    """

    kind: Literal["sfmf"] = "sfmf"

    def check(self, task: Task) -> None:
        """Raise `UserError` for another model, and for trainings other than steps by rating."""
        super().check(task)
        if task.training.kind != "rating_sgd":
            raise UserError(
                f"algorithm.kind = sfmf adds up steps of ratings; use training.kind = rating_sgd, not "
                f"{task.training.kind}"
            )

    def sending_weights(self, chunk: Chunk, task: Task) -> FloatArray:
        """Return 1 for every client, [C]."""
        del task
        return np.ones(len(chunk.clients))

    def moved(self, row_factors: Arrays, total: TensorSum) -> Arrays:
        """Return W plus the sum of the changes."""
        return {ROW_FACTORS: row_factors[ROW_FACTORS] + total.tensors[ROW_FACTORS]}

    def sum_layout(self, task: Task, cohort: int) -> SumLayout | None:
        """Return the layout of the sum of W's changes; raise `UserError` with `rows: touched`."""
        return self.layout_of(task, cohort, cohort)
