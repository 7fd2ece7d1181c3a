"""PowerSGD: rank-r factors by one power iteration, started from the client's last factors.

Reference: Vogels et al., PowerSGD, NeurIPS 2019 (arXiv:1905.13727), Algorithm 1; with `error_feedback` before it,
Algorithm 2.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.factors import LEFT, RIGHT, Factored
from narrowcast.algorithms.codecs.stage import Shapes, Tensors
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays

WARM = "power_sgd/"
"""Prefix of names in a client's state: the warm Q [d, r] of every matrix, zero before the first round."""


class PowerSGD(Factored):
    """Send P = M Q, orthonormalised, and Q = M^T P for a matrix M; the client keeps Q for its next update.

    Differs from the paper: 1. each client has factors of its own, decoded alone; the paper averages P, then Q, over all
    workers in two rounds of communication. 2. the first Q is drawn from the client's key. 3. P is orthonormalised by
    Householder reflections instead of Gram-Schmidt.
    """

    remembers: ClassVar[bool] = True

    kind: Literal["power_sgd"] = "power_sgd"

    def factor(
        self, name: str, matrix: NDArray[np.float32], rank: int, key: int, state: Arrays
    ) -> tuple[Tensors, Arrays]:
        """Return the factors of one power iteration, started from warm columns of Q and random others."""
        kept = np.array(state.get(WARM + name, np.zeros((matrix.shape[1], self.rank))), dtype=np.float32)
        start = generator(key, WARM + name).standard_normal((matrix.shape[1], rank))
        warm = np.flatnonzero(kept[:, :rank].any(axis=0))
        start[:, warm] = kept[:, warm]
        left, _ = np.linalg.qr(matrix.astype(np.float64) @ start)
        right = matrix.T @ left
        if right.any():  # an update of zeros teaches nothing
            kept[:, :rank] = right[:, : kept.shape[1]]
        factors = {name + LEFT: left.astype(np.float32), name + RIGHT: right.astype(np.float32)}
        return factors, {WARM + name: kept}

    def init_state(self, shapes: Shapes, rest: Codec) -> Arrays:
        """Return zeros for every factored matrix, and the state of the rest."""
        warm = {
            WARM + name: np.zeros((int(np.prod(shape[1:])), self.rank), dtype=np.float32)
            for name, shape in shapes.items()
            if self.rank_for(shape)
        }
        return {**super().init_state(shapes, rest), **warm}
