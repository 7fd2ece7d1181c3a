"""Alternating steepest descent."""

from __future__ import annotations

from typing import Literal

from narrowcast.algorithms.completion.completion_problem import Completion
from narrowcast.algorithms.completion.factor_solver import FactorSolver, State
from narrowcast.algorithms.completion.scaled_asd import alternating_step


class ASD(FactorSolver):
    """Alternates exact steps along the gradients of the two factors.

    X <- X + t D Y, then Y <- Y + t D' X with the new X; t minimises the residual.

    Source: Tanner and Wei, Appl. Comput. Harmon. Anal. 40(2), 2016, algorithm 1 (ASD). Differs from the paper: 1. the
    start is divided by the observed share; 2. the residual is computed anew every 50 iterations.
    """

    kind: Literal["asd"] = "asd"

    def iterate(self, problem: Completion, state: State) -> State:
        """Return both factors and the residual after a step of each."""
        return alternating_step(problem, state, scale=False)
