"""PowerSGD: rank-r factors by one power iteration, started from the client's last factors.

Reference: Vogels et al., PowerSGD, NeurIPS 2019 (arXiv:1905.13727), Algorithm 1; with `error_feedback` before it,
Algorithm 2.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.factors import LEFT, RIGHT, Factored
from narrowcast.algorithms.codecs.stage import Shapes, Tensors
from narrowcast.algorithms.codecs.warm_factors import kept_factors, start, zero_factors
from narrowcast.platform.types import Arrays

WARM = "power_sgd/"
"""Prefix of names in a client's state: the warm Q [d, r] of every matrix, zero before the first round."""


class PowerSGD(Factored):
    """Send P = M Q, orthonormalised, and Q = M^T P for a matrix M; the client keeps Q for its next update.

    `warm_start` and error feedback are independent, as in the paper's code (its Tables 1 and 2): without a warm start
    Q is drawn from the client's key in every round and nothing is kept. The paper's unbiased rank r, M U^T for a random
    U, is the codec `basis`.

    Differs from the paper: 1. each client has factors of its own, decoded alone; the paper averages P, then Q, over all
    workers in two rounds of communication. 2. the first Q is drawn from the client's key. 3. P is orthonormalised by
    Householder reflections instead of Gram-Schmidt.
    """

    kind: Literal["power_sgd"] = "power_sgd"
    warm_start: bool = Field(True, description="start from the client's last Q; otherwise from a random one")

    @property
    def remembers(self) -> bool:
        """Return whether the client keeps Q."""
        return self.warm_start

    def factor(self, name: str, matrix: NDArray[Any], rank: int, key: int, state: Arrays) -> tuple[Tensors, Arrays]:
        """Return the factors of one power iteration, started from warm columns of Q and random others."""
        first = start(WARM + name, matrix.shape[1], rank, key, state)
        left, _ = np.linalg.qr(matrix.astype(np.float64) @ first)
        right = matrix.T @ left
        factors = {name + LEFT: left.astype(matrix.dtype), name + RIGHT: right.astype(matrix.dtype)}
        return factors, kept_factors(WARM + name, right, state)

    def init_state(self, shapes: Shapes, rest: Codec) -> Arrays:
        """Return zeros for every factored matrix if it starts warm, and the state of the rest."""
        warm = zero_factors(WARM, self.factored(shapes), self.rank) if self.warm_start else {}
        return {**super().init_state(shapes, rest), **warm}
