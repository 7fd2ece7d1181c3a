"""Soft-Impute: the nuclear-norm baseline."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.completion.completion_problem import Completion
from narrowcast.algorithms.completion.factor_solver import State
from narrowcast.algorithms.completion.low_rank_matrix import leading
from narrowcast.algorithms.completion.niht import HardThresholding
from narrowcast.platform.types import FloatArray


class SoftImpute(HardThresholding):
    """Proximal gradient on ||P_Omega(M - X)||^2 / 2 + l ||X||_*: the filled matrix, its singular values lowered by l.

    X <- S_l(X + P_Omega(M - X)). l falls by `decay` an iteration from half of sigma_1 of the zero-filled matrix to
    `penalty` of it. `rank` bounds the rank of the answer; the penalty decides it below.

    Source: Mazumder, Hastie and Tibshirani, JMLR 11, 2010, algorithm 1. Differs from the paper: 1. the path of l has
    one iteration a value; 2. singular values are found by subspace iteration from the previous ones.
    """

    kind: Literal["soft_impute"] = "soft_impute"
    penalty: float = Field(1e-3, gt=0, lt=1, description="penalty l, relative to sigma_1 of the zero-filled matrix")
    decay: float = Field(0.7, gt=0, lt=1, description="factor by which l falls in an iteration, until it is `penalty`")

    def begin(self, problem: Completion, left: FloatArray, right: FloatArray) -> State:
        """Return the arrays of X = 0."""
        state = super().begin(problem, left, right)
        largest = np.linalg.norm(state["left"], 2) * problem.observed.fraction
        nothing = {"left": np.zeros_like(left), "residual": problem.observed.values.copy()}
        return {**state, **nothing, "largest": np.array(largest), "relative": np.array(0.5)}

    def iterate(self, problem: Completion, state: State) -> State:
        """Return the arrays after one proximal step."""
        observed, rank, block = problem.observed, state["left"].shape[1], state["block"]
        relative = max(self.penalty, self.decay * float(state["relative"]))
        filled = (state["left"], state["right"])
        u, s, block = leading(observed, state["residual"], block.shape[1], block, self.passes, filled)
        left = u[:, :rank] * np.maximum(s[:rank] - relative * float(state["largest"]), 0)
        right = block[:, :rank]
        residual = observed.residual(left, right)
        return {"left": left, "right": right, "block": block, "residual": residual, "relative": np.array(relative)}
