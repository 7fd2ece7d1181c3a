"""Alternating least squares with a ridge, for matrices that are only nearly of low rank, such as ratings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from narrowcast.algorithms.completion.completion_problem import Completion
from narrowcast.algorithms.completion.factor_solver import FactorSolver, State


class ALS(FactorSolver):
    """Alternates ridge regressions of the rows of the two factors.

    The objective is the sum over the observed entries of (m_ij - <x_i, y_j>)^2 + a (|x_i|^2 + |y_j|^2), so that a row
    is decayed by its number of entries. 2 p k^2 operations for the Gram matrices of all rows.

    Source: Zhou, Wilkinson, Schreiber and Pan, AAIM 2008, section 3.1 (ALS-WR). Differs from the paper: 1. the start is
    the leading singular triples, not the mean ratings and noise.
    """

    kind: Literal["als"] = "als"
    weight_decay: float = Field(
        0.1, ge=0, description="ridge a of an entry, in the unit of the squared factors; 0 is plain least squares"
    )

    def iterate(self, problem: Completion, state: State) -> State:
        """Return the factors after a regression of each, the left one first."""
        observed = problem.observed
        left = observed.row_fits(observed.values, state["right"], self.weight_decay)
        turned = observed.transposed
        right = turned.row_fits(turned.values, left, self.weight_decay)
        return {"left": left, "right": right, "residual": observed.residual(left, right)}
