"""Normalised iterative hard thresholding."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.completion.completion_problem import Completion
from narrowcast.algorithms.completion.factor_solver import FactorSolver, State
from narrowcast.algorithms.completion.low_rank_matrix import OVERSAMPLED, leading, truncated
from narrowcast.algorithms.completion.observed import ObservedMatrix
from narrowcast.platform.types import FloatArray

_LARGEST = 1e3
"""Of step sizes, as in the authors' program."""
_HALVINGS = 12
"""Most of one step."""


class HardThresholding(FactorSolver):
    """Fields and steps of methods that take a gradient step and go back to the rank by an SVD.

    left = U diag(s) and right = V, of orthonormal columns; `basis` is U. The SVD is that of a matrix of low rank plus
    a sparse one, by subspace iteration from the previous V.
    """

    passes: int = Field(3, ge=1, description="passes of subspace iteration in an SVD, each with two sparse products")

    def begin(self, problem: Completion, left: FloatArray, right: FloatArray) -> State:
        """Return the arrays of a stage: the SVD of the start, and a block that later SVDs start from."""
        u, s, v = truncated(left, right, left.shape[1])
        left = u * s
        extra = np.eye(len(v), min(OVERSAMPLED, min(len(u), len(v)) - len(s)))
        return {**super().begin(problem, left, v), "basis": u, "block": np.hstack([v, extra])}

    def thresholded(self, problem: Completion, state: State, change: FloatArray) -> State:
        """Return the arrays of the nearest matrix of the same rank to left right' + P_Omega(change)."""
        observed, rank, block = problem.observed, state["left"].shape[1], state["block"]
        low_rank = (state["left"], state["right"])
        u, s, block = leading(observed, change, block.shape[1], block, self.passes, low_rank)
        left, right = u[:, :rank] * s[:rank], block[:, :rank]
        residual = observed.residual(left, right)
        return {"left": left, "right": right, "basis": u[:, :rank], "block": block, "residual": residual}

    def lowered(self, problem: Completion, state: State) -> State:
        """Return the arrays after the exact step along the residual, halved while the residual would grow."""
        residual = state["residual"]
        step = exact_step(in_span(problem.observed, state["basis"], residual), residual)
        new = self.thresholded(problem, state, step * residual)
        for _ in range(_HALVINGS):
            if not grows(new, state):
                break
            step /= 2
            new = self.thresholded(problem, state, step * residual)
        return new


class NIHT(HardThresholding):
    """Takes the step along the residual that is exact within the current column space, and thresholds the rank.

    X <- H_k(X + a D), a = ||U U'D||^2 / ||P_Omega(U U'D)||^2.

    Source: Tanner and Wei, SIAM J. Sci. Comput. 35(5), 2013, algorithm 1 (NIHT with row-space projection). Differs from
    the paper: 1. a is halved while the residual would grow, as in Blumensath and Davies, IEEE J. Sel. Top. Signal
    Process. 4(2), 2010, where thresholding leaves the space that a is exact in; without that a residual may grow beyond
    the data.
    """

    kind: Literal["niht"] = "niht"

    def iterate(self, problem: Completion, state: State) -> State:
        """Return the arrays after one step."""
        return self.lowered(problem, state)


def grows(new: State, state: State) -> bool:
    """Return whether the residual of a new state is larger."""
    return bool(np.linalg.norm(new["residual"]) > np.linalg.norm(state["residual"]))


def in_span(observed: ObservedMatrix, basis: FloatArray, values: FloatArray) -> FloatArray:
    """Return P_Omega(U U'D) [p] for the basis U [m, k] and D of these values."""
    return observed.sampled(basis, observed.transposed_times(values, basis))


def exact_step(image: FloatArray, residual: FloatArray) -> float:
    """Return <image, residual> / ||image||^2, or 1 if it were larger than a thousand."""
    top, bottom = float(image @ residual), float(image @ image)
    return top / bottom if abs(top) < _LARGEST * bottom else 1.0
