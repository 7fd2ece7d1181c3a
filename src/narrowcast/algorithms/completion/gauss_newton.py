"""Gauss-Newton steps for completion at a fixed rank."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.completion.completion_problem import Completion
from narrowcast.algorithms.completion.factor_solver import FactorSolver, State
from narrowcast.algorithms.completion.low_rank_matrix import truncated
from narrowcast.algorithms.completion.observed import ObservedMatrix
from narrowcast.platform.types import FloatArray


class GaussNewton(FactorSolver):
    """Fits the observed entries over the tangent space of the current matrix, and goes back to its rank by an SVD.

    At X = U diag(s) V' the change A V' + U B' of least norm minimises ||P_Omega(M - X - A V' - U B')||, by conjugate
    gradients on the least squares; the bases are orthonormal, so that the condition of the matrix does not enter. A
    step that raises the residual is halved. For few observations, where first-order methods need thousands of
    iterations.

    Source: Zilber and Nadler, GNMR, SIAM J. Math. Data Sci. 4(2), 2022 (updating variant). Differs from the paper: 1.
    the least squares are solved in orthonormal bases; 2. they are not solved to the end; 3. the step is retracted by
    the truncated SVD of X + A V' + U B'.
    """

    kind: Literal["gauss_newton"] = "gauss_newton"
    inner_iterations: int = Field(200, ge=1, description="most iterations of conjugate gradients in a step")
    inner_tolerance: float = Field(
        1e-2, gt=0, lt=1, description="the least squares end when their gradient has fallen by this factor"
    )

    def iterate(self, problem: Completion, state: State) -> State:
        """Return factors and residual after one step."""
        observed, residual = problem.observed, state["residual"]
        rank = state["left"].shape[1]
        u, s, v = truncated(state["left"], state["right"], rank)
        a, b = _tangent_fit(observed, residual, u, v, self.inner_iterations, self.inner_tolerance)
        norm, step = float(state["norm"]), 1.0
        for _ in range(30):
            left, values, right = truncated(np.hstack([u, step * a]), np.hstack([v * s + step * b, v]), rank)
            left = left * values
            residual = observed.residual(left, right)
            if np.linalg.norm(residual) < norm:
                return {"left": left, "right": right, "residual": residual}
            step /= 2
        return {}


def _tangent_fit(
    observed: ObservedMatrix, residual: FloatArray, u: FloatArray, v: FloatArray, iterations: int, tolerance: float
) -> tuple[FloatArray, FloatArray]:
    """Return A [m, k] and B [n, k] that minimise ||residual - P_Omega(A V' + U B')||, by CGLS from 0."""
    fixed_left, fixed_right = np.empty((len(u), 2 * u.shape[1])), np.empty((len(v), 2 * v.shape[1]))
    rank = u.shape[1]
    fixed_left[:, rank:], fixed_right[:, :rank] = u, v
    a, b = np.zeros_like(u), np.zeros_like(v)
    rest = residual.copy()
    ga, gb = observed.times(rest, v), observed.transposed_times(rest, u)
    da, db = ga.copy(), gb.copy()
    energy = float(np.vdot(ga, ga) + np.vdot(gb, gb))
    goal = energy * tolerance**2
    for _ in range(iterations):
        if energy <= goal or not energy:
            break
        fixed_left[:, :rank], fixed_right[:, rank:] = da, db
        change = observed.sampled(fixed_left, fixed_right)
        step = energy / float(change @ change)
        a += step * da
        b += step * db
        rest -= step * change
        ga, gb = observed.times(rest, v), observed.transposed_times(rest, u)
        before, energy = energy, float(np.vdot(ga, ga) + np.vdot(gb, gb))
        da, db = ga + energy / before * da, gb + energy / before * db
    return a, b
