"""Scaled alternating steepest descent."""

from __future__ import annotations

from typing import Literal

from narrowcast.algorithms.completion.completion_problem import Completion
from narrowcast.algorithms.completion.descent import REFRESH, left_step, right_step
from narrowcast.algorithms.completion.factor_solver import FactorSolver, State


class ScaledASD(FactorSolver):
    """Alternates exact steps along the gradients of the two factors, scaled by the other factor's inverse Gram matrix.

    X <- X + t D Y (Y'Y)^-1, then Y <- Y + t D' X (X'X)^-1 with the new X; t minimises the residual.

    Source: Tanner and Wei, Appl. Comput. Harmon. Anal. 40(2), 2016, algorithm 2 (ScaledASD). Differs from the paper: 1.
    the start is divided by the observed share; 2. the residual is computed anew every 50 iterations.
    """

    kind: Literal["scaled_asd"] = "scaled_asd"

    def iterate(self, problem: Completion, state: State) -> State:
        """Return both factors and the residual after a step of each."""
        return alternating_step(problem, state, scale=True)


def alternating_step(problem: Completion, state: State, *, scale: bool) -> State:
    """Return both factors and the residual after a step of each, scaled or not."""
    observed, left, right, residual = problem.observed, state["left"], state["right"], state["residual"]
    if int(state["iterations"]) % REFRESH == REFRESH - 1:
        residual = observed.residual(left, right)
    left, residual = left_step(observed, left, right, residual, scale=scale)
    right, residual = right_step(observed, left, right, residual, scale=scale)
    return {"left": left, "right": right, "residual": residual}
