"""MatrixIRLS: iteratively reweighted least squares for the log-determinant objective."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.completion.completion_problem import Completion
from narrowcast.algorithms.completion.factor_solver import State
from narrowcast.algorithms.completion.low_rank_matrix import leading, random_block
from narrowcast.algorithms.completion.observed import ObservedMatrix
from narrowcast.algorithms.completion.residual_progress import PROGRESS, progress
from narrowcast.algorithms.completion.solver_checks import check_completion, rank_of, row_major
from narrowcast.platform.section import Section
from narrowcast.platform.solver_contracts import Report
from narrowcast.platform.types import Arrays, FloatArray

_LEAST_SMOOTHING = 1e-15


class MatrixIRLS(Section):
    """Minimises a smoothed log-determinant over the matrices that agree with all observed entries.

    With singular values s_i and smoothing e of the iterate, the next one is the X with P_Omega(X) = P_Omega(M) of least
    weighted norm, the weights being 1 / (max(s_i, e) max(s_j, e)). Only its part in the tangent space at the rank above
    e is solved for, by conjugate gradients; the rest is sparse. Then e <- min(e, s_{r+1}). A second-order method, for
    few observations and high condition numbers.

    Source: Kuemmerle and Verdun, ICML 2021 (arXiv:2106.02119), algorithm 1. Differs from the paper: 1. singular values
    are those of subspace iteration from the previous ones, not of Krylov blocks; 2. the answer is the leading part, of
    rank r.
    """

    kind: Literal["matrix_irls"] = "matrix_irls"
    rank: int | None = Field(None, ge=1, description="rank of the answer; null: that of the problem, where it is known")
    inner_iterations: int = Field(200, ge=1, description="most iterations of conjugate gradients in a step")
    inner_tolerance: float = Field(1e-5, gt=0, lt=1, description="relative residual at which these end")
    passes: int = Field(4, ge=1, description="passes of subspace iteration in an SVD, each with two sparse products")

    def check(self, problem: Any) -> None:
        """Raise `UserError` if the problem is no completion problem or has no matrix of this rank."""
        check_completion(problem, self.rank)

    def init(self, problem: Completion, seed: int) -> Arrays:
        """Return the state of the zero-filled matrix."""
        self.check(problem)
        observed, rank = problem.observed, rank_of(problem, self.rank)
        block = random_block(observed, rank, seed)
        empty = np.zeros((observed.rows, 0)), np.zeros((observed.columns, 0))
        return {**self._decomposed(observed, observed.values, *empty, block, rank, np.inf, 10), **PROGRESS}

    def step(self, problem: Completion, state: Arrays) -> tuple[Arrays, Report]:
        """Return the state after one reweighted least-squares problem."""
        observed, rank = problem.observed, rank_of(problem, self.rank)
        smoothing = float(state["smoothing"])
        above = max(1, int(np.count_nonzero(state["s"] > smoothing)))
        u, s, v = state["u"][:, :above], state["s"][:above], state["v"][:, :above]
        left, right = self._tangent_solution(observed, u, s, v, max(smoothing, _LEAST_SMOOTHING))
        rest = observed.residual(left, right)
        new = self._decomposed(observed, rest, left, right, state["block"], rank, smoothing, self.passes)
        norm = float(np.linalg.norm(observed.residual(new["u"] * new["s"], new["v"])))
        status, kept = progress(state, norm, observed.norm)
        return {**new, **kept}, Report(norm / observed.norm, status)

    def answer(self, state: Arrays) -> Arrays:
        """Return `left` [m, r] and `right` [n, r] of the leading part of the iterate."""
        return {"left": state["u"] * state["s"], "right": state["v"]}

    def _decomposed(
        self,
        observed: ObservedMatrix,
        rest: FloatArray,
        left: FloatArray,
        right: FloatArray,
        block: FloatArray,
        rank: int,
        smoothing: float,
        passes: int,
    ) -> State:
        """Return the SVD of left right' + P_Omega(rest), and the smoothing that follows from it."""
        u, s, block = leading(observed, rest, block.shape[1], block, passes, (left, right))
        smoothing = min(smoothing, float(s[rank])) if len(s) > rank else min(smoothing, float(s[-1]) / 2)
        smoothing = max(smoothing, _LEAST_SMOOTHING * float(s[0]))
        leading_part = {"u": u[:, :rank], "s": s[:rank], "v": block[:, :rank]}
        return row_major({**leading_part, "block": block, "smoothing": np.array(smoothing)})

    def _tangent_solution(
        self, observed: ObservedMatrix, u: FloatArray, s: FloatArray, v: FloatArray, smoothing: float
    ) -> tuple[FloatArray, FloatArray]:
        """Return factors [m, 2 k] and [n, 2 k] of the part U C V' + U B' + A V' in the tangent space.

        C, B and A solve (P_T' P_Omega' P_Omega P_T + diag(e^2 / (w - e^2))) (C, B, A) = P_T' P_Omega'(M), with w =
        s_i s_j for C and s_i e for A and B. A is orthogonal to U and B to V.
        """
        square = smoothing**2
        core = square / np.maximum(s[:, None] * s[None, :] - square, np.finfo(float).tiny)
        border = smoothing / np.maximum(s - smoothing, np.finfo(float).tiny)
        share = observed.fraction

        def adjoint(values: FloatArray) -> list[FloatArray]:
            a, b = observed.times(values, v), observed.transposed_times(values, u)
            c = u.T @ a
            return [c, b - v @ c.T, a - u @ c]

        def factors(x: list[FloatArray]) -> tuple[FloatArray, FloatArray]:
            return np.hstack([u, x[2]]), np.hstack([v @ x[0].T + x[1], v])

        def apply(x: list[FloatArray]) -> list[FloatArray]:
            seen = adjoint(observed.sampled(*factors(x)))
            return [seen[0] + core * x[0], seen[1] + x[1] * border, seen[2] + x[2] * border]

        def eased(x: list[FloatArray]) -> list[FloatArray]:
            # projected again, since rounding leaves the tangent space and conjugate gradients amplify that
            return [
                x[0] / (core + share),
                (x[1] - v @ (v.T @ x[1])) / (border + share),
                (x[2] - u @ (u.T @ x[2])) / (border + share),
            ]

        x = [np.diag(s), np.zeros_like(v), np.zeros_like(u)]
        data = adjoint(observed.values)
        rest = [each - other for each, other in zip(data, apply(x), strict=True)]
        goal = max(self.inner_tolerance * min(1.0, smoothing / float(s[0])), _LEAST_SMOOTHING) * _norm(data)
        easy = eased(rest)
        direction, slope = easy, _dot(rest, easy)
        for _ in range(self.inner_iterations):
            if _norm(rest) <= goal or not slope > 0:
                break
            image = apply(direction)
            step = slope / _dot(direction, image)
            x = [each + step * other for each, other in zip(x, direction, strict=True)]
            rest = [each - step * other for each, other in zip(rest, image, strict=True)]
            easy = eased(rest)
            before, slope = slope, _dot(rest, easy)
            direction = [each + slope / before * other for each, other in zip(easy, direction, strict=True)]
        return factors(x)


def _dot(one: list[FloatArray], other: list[FloatArray]) -> float:
    return float(sum(np.vdot(a, b) for a, b in zip(one, other, strict=True)))


def _norm(x: list[FloatArray]) -> float:
    return float(np.sqrt(_dot(x, x)))
