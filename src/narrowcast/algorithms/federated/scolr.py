"""SCoLR: CoLR in which every client trains and sends as many components as its link affords.

Reference: Nguyen et al., WWW 2024 (arXiv:2401.03748), section 4.4, equation 6 and Algorithm 2. The authors released no
code for it; with `per_item_mean` and `rank_policy: uniform` this one reproduces their Table 4. Letters: as in `colr`;
r_g is the rank of the global update, r_u that of client u's, S_u the components that it trains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.channel.joint import Choices, head_bits
from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.federated.factorisation_checks import expected_rows, named_rows
from narrowcast.algorithms.federated.low_rank import LowRank
from narrowcast.algorithms.federated.low_rank_form import UpdateSizes
from narrowcast.algorithms.federated.rank_policy import RANK_POLICIES, RankPolicy, UniformRank
from narrowcast.platform.contracts import RateDistortion, Task
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.types import Chunk, FloatArray, IntArray

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
