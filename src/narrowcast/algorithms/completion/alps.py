"""Matrix ALPS II."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.completion.completion_problem import Completion
from narrowcast.algorithms.completion.factor_solver import State
from narrowcast.algorithms.completion.low_rank_matrix import leading, truncated
from narrowcast.algorithms.completion.niht import HardThresholding, exact_step, in_span
from narrowcast.algorithms.completion.observed import ObservedMatrix
from narrowcast.platform.types import FloatArray


class ALPS(HardThresholding):
    """Hard thresholding in the span of current and new directions, with a corrected answer and momentum.

    Q = X + t (X - X_old), D its residual. S spans the columns of X and X_old and the k leading left vectors of D
    outside of them. W = H_k(Q + a S S'D); Y = W + b U_W U_W' P_Omega(M - W); X = Y + c P_Omega(M - Y) V_Y V_Y', of rank
    k; t minimises the residual of the next Q. The steps a, b and c are exact.

    Source: Kyrillidis and Cevher, J. Math. Imaging Vis. 48(2), 2014, algorithm 4 (Matrix ALPS II); `momentum` false is
    algorithm 1, Matrix ALPS I. Differs from the paper: 1. the step c: without it the row space of X only turns along S,
    and iterations end above the best fit, by 5 % on drawn matrices, where noise or a larger rank leaves a residual.
    """

    kind: Literal["alps"] = "alps"
    momentum: bool = Field(True, description="take a step of momentum; without, Matrix ALPS I")

    def begin(self, problem: Completion, left: FloatArray, right: FloatArray) -> State:
        """Return the arrays of a stage; left is the basis U and right [n, k] the rest."""
        state = super().begin(problem, left, right)
        basis, right = state["basis"], state["right"] * np.linalg.norm(state["left"], axis=0)
        old = {"old_left": basis, "old_right": right, "old_residual": state["residual"], "factor": np.array(0.0)}
        return {**state, "left": basis, "right": right, **old}

    def iterate(self, problem: Completion, state: State) -> State:
        """Return the arrays after one iteration."""
        observed, rank = problem.observed, state["left"].shape[1]
        factor = float(state["factor"])
        residual = (1 + factor) * state["residual"] - factor * state["old_residual"]
        left = np.hstack([state["left"], state["old_left"]])
        right = np.hstack([(1 + factor) * state["right"], -factor * state["old_right"]])
        span = np.linalg.qr(left if factor else state["left"])[0]
        outside = (-span, observed.transposed_times(residual, span))
        block = state["block"]
        new, _, block = leading(observed, residual, block.shape[1], block, self.passes, outside)
        span = np.linalg.qr(np.hstack([span, new[:, :rank]]))[0]
        inside = observed.transposed_times(residual, span)
        step = exact_step(observed.sampled(span, inside), residual)
        basis, s, v = truncated(np.hstack([left, span]), np.hstack([right, step * inside]), rank)
        fitted = v * s
        rest = observed.residual(basis, fitted)
        step = exact_step(in_span(observed, basis, rest), rest)
        fitted = fitted + step * observed.transposed_times(rest, basis)
        basis, fitted = _row_corrected(observed, basis, fitted)
        rest = observed.residual(basis, fitted)
        found = {"left": basis, "right": fitted, "basis": basis, "block": block, "residual": rest}
        kept = {"old_left": state["left"], "old_right": state["right"], "old_residual": state["residual"]}
        return {**found, **kept, "factor": np.array(self._factor(rest, state["residual"]))}

    def _factor(self, residual: FloatArray, old: FloatArray) -> float:
        moved = old - residual
        bottom = float(moved @ moved)
        return float(residual @ moved) / bottom if self.momentum and bottom else 0.0


def _row_corrected(observed: ObservedMatrix, left: FloatArray, right: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return factors after an exact step along the row space of left right', the left one orthonormal."""
    rows, triangle = np.linalg.qr(right)
    rest = observed.residual(left, right)
    change = observed.times(rest, rows)
    step = exact_step(observed.sampled(change, rows), rest)
    basis, mixing = np.linalg.qr(left @ triangle.T + step * change)
    return basis, rows @ mixing.T
