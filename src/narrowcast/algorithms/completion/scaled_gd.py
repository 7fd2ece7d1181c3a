"""Scaled gradient descent."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.completion.completion_problem import Completion
from narrowcast.algorithms.completion.descent import scaled
from narrowcast.algorithms.completion.factor_solver import FactorSolver, State
from narrowcast.platform.types import FloatArray


class ScaledGD(FactorSolver):
    """Moves both factors at once along gradients that the other factor's inverse Gram matrix scales, by a fixed step.

    L <- L + (a / p) D R (R'R)^-1 and R <- R + (a / p) D'L (L'L)^-1 from the same L, R and D; p is the observed share.

    Source: Tong, Ma and Chi, JMLR 22(150), 2021, equation 8. Differs from the paper: 1. a step after which the residual
    has doubled is undone and the step size halved; 2. factors are not clipped to incoherent ones.
    """

    kind: Literal["scaled_gd"] = "scaled_gd"
    step_size: float = Field(0.5, gt=0, le=2, description="step size a")

    def begin(self, problem: Completion, left: FloatArray, right: FloatArray) -> State:
        """Return the arrays of a stage, with the whole step size."""
        return {**super().begin(problem, left, right), "step_size": np.array(self.step_size)}

    def iterate(self, problem: Completion, state: State) -> State:
        """Return both factors after one step, or the old ones with half the step size."""
        observed, left, right, residual = problem.observed, state["left"], state["right"], state["residual"]
        step = float(state["step_size"]) / observed.fraction
        new_left = left + step * scaled(observed.times(residual, right), right)
        new_right = right + step * scaled(observed.transposed_times(residual, left), left)
        residual = observed.residual(new_left, new_right)
        if not np.linalg.norm(residual) <= 2 * float(state["norm"]):
            return {"step_size": state["step_size"] / 2}
        return {"left": new_left, "right": new_right, "residual": residual}
