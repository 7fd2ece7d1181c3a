"""CoLR: updates of low rank in a random basis B that all clients of a round share and regenerate from a seed.

Reference: Nguyen et al., Towards Efficient Communication and Secure Federated Recommendation System via Low-rank
Training, WWW 2024 (arXiv:2401.03748), section 4.3 and Algorithm 1. Letters: Q [N, d], A [N, r], B [r, d]; the paper
writes their transposes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import numpy as np

from narrowcast.algorithms.federated.low_rank import LowRank
from narrowcast.algorithms.federated.low_rank_form import UpdateSizes
from narrowcast.platform.contracts import Task
from narrowcast.platform.types import Chunk, IntArray


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
