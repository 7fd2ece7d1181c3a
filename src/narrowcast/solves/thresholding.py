"""Thresholding of singular values: the hard methods NIHT, CGIHT and Matrix ALPS II, and Soft-Impute."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.platform.types import FloatArray
from narrowcast.solves.completion_problems import Completion
from narrowcast.solves.factor_solver import FactorSolver, State
from narrowcast.solves.observed import OVERSAMPLED, ObservedMatrix, leading, truncated

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


class CGIHT(HardThresholding):
    """Hard thresholding along directions that are conjugate within the current column space.

    d <- D - b d with b = <P(U U'D), P(U U'd)> / ||P(U U'd)||^2, then X <- H_k(X + a d), a being exact along U U'd; P is
    the restriction to the observed entries. The gradient is exact: only the direction differs from NIHT's.

    Source: Blanchard, Tanner and Wei, Information and Inference 4(4), 2015, algorithm 1 (CGIHT). Differs from the
    paper: 1. where the residual would grow, the step is NIHT's, and the next direction conjugate to it: former
    residuals that no matrix of the rank fits led away from the best fit.
    """

    kind: Literal["cgiht"] = "cgiht"

    def begin(self, problem: Completion, left: FloatArray, right: FloatArray) -> State:
        """Return the arrays of a stage, whose first direction is the residual."""
        state = super().begin(problem, left, right)
        return {**state, "direction": state["residual"].copy()}

    def iterate(self, problem: Completion, state: State) -> State:
        """Return the arrays after one step."""
        observed, residual, direction = problem.observed, state["residual"], state["direction"]
        image = in_span(observed, state["basis"], direction)
        if int(state["iterations"]):
            slope = in_span(observed, state["basis"], residual)
            top, bottom = float(slope @ image), float(image @ image)
            conjugate = top / bottom if abs(top) < _LARGEST * bottom else 0.0
            direction = residual - conjugate * direction
            image = slope - conjugate * image
        new = self.thresholded(problem, state, exact_step(image, residual) * direction)
        if grows(new, state):
            new, direction = self.lowered(problem, state), residual
        return {**new, "direction": direction}


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
        fields = {"left": basis, "right": fitted, "basis": basis, "block": block, "residual": rest}
        previous = {"old_left": state["left"], "old_right": state["right"], "old_residual": state["residual"]}
        return {**fields, **previous, "factor": np.array(self._factor(rest, state["residual"]))}

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


class SoftImpute(HardThresholding):
    """Proximal gradient on ||P_Omega(M - X)||^2 / 2 + l ||X||_*: the filled matrix, its singular values lowered by l.

    It is the baseline of the nuclear norm: X <- S_l(X + P_Omega(M - X)). l falls by `decay` an iteration from half of
    sigma_1 of the zero-filled matrix to `penalty` of it. `rank` bounds the rank of the answer; the penalty decides it
    below.

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
