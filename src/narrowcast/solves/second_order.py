"""Second-order and Riemannian solvers of completion: Gauss-Newton, MatrixIRLS and R3MC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import Field

from narrowcast.platform.config.files import Section
from narrowcast.platform.solving import Solver, StepResult
from narrowcast.platform.types import Arrays, FloatArray
from narrowcast.solves.completion_problems import Completion
from narrowcast.solves.factor_solver import (
    PROGRESS,
    FactorSolver,
    State,
    check_completion,
    progress,
    rank_of,
    row_major,
)
from narrowcast.solves.observed import ObservedMatrix, leading, random_block, truncated


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


_LEAST_SMOOTHING = 1e-15


class MatrixIRLS(Solver, Section):
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
        """Raise `UserError` if the problem is not a completion problem or the rank exceeds its matrix."""
        check_completion(problem, self.rank)

    def init(self, problem: Completion, seed: int) -> Arrays:
        """Return the state of the zero-filled matrix."""
        self.check(problem)
        observed, rank = problem.observed, rank_of(problem, self.rank)
        block = random_block(observed, rank, seed)
        empty = np.zeros((observed.rows, 0)), np.zeros((observed.columns, 0))
        return {**self._decomposed(observed, observed.values, *empty, block, rank, np.inf, 10), **PROGRESS}

    def step(self, problem: Completion, state: Arrays) -> tuple[Arrays, StepResult]:
        """Return the state after one reweighted least-squares problem."""
        observed, rank = problem.observed, rank_of(problem, self.rank)
        smoothing = float(state["smoothing"])
        above = max(1, int(np.count_nonzero(state["s"] > smoothing)))
        u, s, v = state["u"][:, :above], state["s"][:above], state["v"][:, :above]
        left, right = self._tangent_solution(observed, u, s, v, max(smoothing, _LEAST_SMOOTHING))
        rest = observed.residual(left, right)
        new = self._decomposed(observed, rest, left, right, state["block"], rank, smoothing, self.passes)
        norm = float(np.linalg.norm(observed.residual(new["u"] * new["s"], new["v"])))
        status, record = progress(state, norm, observed.norm)
        return {**new, **record}, StepResult(norm / observed.norm, status)

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
        rest = [known - image for known, image in zip(data, apply(x), strict=True)]
        goal = max(self.inner_tolerance * min(1.0, smoothing / float(s[0])), _LEAST_SMOOTHING) * _norm(data)
        easy = eased(rest)
        direction, slope = easy, _dot(rest, easy)
        for _ in range(self.inner_iterations):
            if _norm(rest) <= goal or not slope > 0:
                break
            image = apply(direction)
            step = slope / _dot(direction, image)
            x = [block + step * move for block, move in zip(x, direction, strict=True)]
            rest = [block - step * move for block, move in zip(rest, image, strict=True)]
            easy = eased(rest)
            before, slope = slope, _dot(rest, easy)
            direction = [block + slope / before * former for block, former in zip(easy, direction, strict=True)]
        return factors(x)


def _dot(left: list[FloatArray], right: list[FloatArray]) -> float:
    return float(sum(np.vdot(a, b) for a, b in zip(left, right, strict=True)))


def _norm(x: list[FloatArray]) -> float:
    return float(np.sqrt(_dot(x, x)))


@dataclass(frozen=True)
class FixedRankPoint:
    """A matrix U diag(s) V' of fixed rank; orthonormal u [m, k] and v [n, k], s [k] positive."""

    u: FloatArray
    s: FloatArray
    v: FloatArray


@dataclass(frozen=True)
class Direction:
    """A tangent vector at a point (U, R, V), R = diag(s): (xi_U [m, k], xi_R [k, k], xi_V [n, k]) as `u`, `r` and `v`.

    The metric, which is R3MC's scaled one, is tr(R R' xi_U' eta_U) + tr(R'R xi_V' eta_V) + tr(xi_R' eta_R). With a
    diagonal R all equations are solved entry by entry.

    Source: Mishra and Sepulchre, arXiv:1306.2672, sections II and III.
    """

    u: FloatArray
    r: FloatArray
    v: FloatArray

    def plus(self, factor: float, direction: Direction) -> Direction:
        """Return this direction plus a multiple of the other."""
        return Direction(self.u + factor * direction.u, self.r + factor * direction.r, self.v + factor * direction.v)


def inner(point: FixedRankPoint, left: Direction, right: Direction) -> float:
    """Return the metric's inner product of two directions."""
    weights = point.s**2
    return float(
        np.einsum("ik,ik,k->", left.u, right.u, weights)
        + np.einsum("ik,ik,k->", left.v, right.v, weights)
        + np.vdot(left.r, right.r)
    )


def gradient(point: FixedRankPoint, towards_u: FloatArray, towards_v: FloatArray) -> Direction:
    """Return minus the Riemannian gradient of ||D||^2 / 2 from D V [m, k] and D'U [n, k], D being the residual."""
    inside = point.u.T @ towards_u
    return Direction(
        _scaled_tangent(point.u, point.s, towards_u, inside * point.s),
        inside,
        _scaled_tangent(point.v, point.s, towards_v, inside.T * point.s),
    )


def _scaled_tangent(basis: FloatArray, s: FloatArray, towards: FloatArray, inside: FloatArray) -> FloatArray:
    """Return (G - U B) (R R')^-1 with G = towards R and the symmetric B that makes it a tangent."""
    moved = s[:, None] ** 2 * inside
    b = (moved + moved.T) / (s[:, None] ** 2 + s[None, :] ** 2)
    return (towards * s - basis @ b) / s**2


def horizontal(point: FixedRankPoint, direction: Direction) -> Direction:
    """Return the part of a direction of the ambient space that is tangent, and changes the matrix."""
    u, v = (_tangent(basis, point.s, part) for basis, part in ((point.u, direction.u), (point.v, direction.v)))
    s, r = point.s, direction.r
    squares, product = s[:, None] ** 2 + s[None, :] ** 2, s[:, None] * s[None, :]
    a = _skew((point.u.T @ u) * s**2 - r * s)
    c = _skew((point.v.T @ v) * s**2 + s[:, None] * r)
    determinant = squares**2 - product**2
    of_left, of_right = (squares * a + product * c) / determinant, (squares * c + product * a) / determinant
    return Direction(u - point.u @ of_left, r - (s[:, None] * of_right - of_left * s), v - point.v @ of_right)


def _tangent(basis: FloatArray, s: FloatArray, part: FloatArray) -> FloatArray:
    """Return the part of a direction [m, k] that is tangent to orthonormal bases, under the metric."""
    inside = basis.T @ part
    moved = s[:, None] ** 2 * (inside + inside.T) * s**2
    return part - basis @ (moved / (s[:, None] ** 2 + s[None, :] ** 2)) / s**2


def retracted(
    point: FixedRankPoint, direction: Direction, step: float
) -> tuple[FixedRankPoint, FloatArray, FloatArray]:
    """Return the point after a step, by polar factors, and the rotations of U and V that make its R diagonal."""
    u, v = (_polar(basis + step * part) for basis, part in ((point.u, direction.u), (point.v, direction.v)))
    left, s, right = np.linalg.svd(np.diag(point.s) + step * direction.r)
    return FixedRankPoint(u @ left, s, v @ right.T), left, right.T


def transported(point: FixedRankPoint, direction: Direction, left: FloatArray, right: FloatArray) -> Direction:
    """Return a direction moved to the point, to which these rotations belong."""
    return horizontal(point, Direction(direction.u @ left, left.T @ direction.r @ right, direction.v @ right))


def _polar(matrix: FloatArray) -> FloatArray:
    u, _, vt = np.linalg.svd(matrix, full_matrices=False)
    return np.asarray(u @ vt)


def _skew(matrix: FloatArray) -> FloatArray:
    return (matrix - matrix.T) / 2


_SUFFICIENT = 1e-4
_HALVINGS = 20


class R3MC(FactorSolver):
    """Nonlinear conjugate gradients over matrices U R V' of fixed rank, under a metric that takes out their scale.

    Steps are exact for the linearised problem and halved until the residual falls enough (Armijo, 1e-4); directions by
    Fletcher and Reeves, anew along the gradient where they would ascend.

    Source: Mishra and Sepulchre, arXiv:1306.2672, algorithm 1; with `continuation`, its rank updates. Differs from the
    paper: 1. R is kept diagonal, so that Lyapunov equations are solved entry by entry; 2. the transported direction is
    not rescaled.
    """

    kind: Literal["r3mc"] = "r3mc"

    def begin(self, problem: Completion, left: FloatArray, right: FloatArray) -> State:
        """Return the arrays of a stage; left is U diag(s)."""
        u, s, v = truncated(left, right, left.shape[1])
        s = np.maximum(s, np.finfo(float).eps * max(float(s[0]), np.finfo(float).tiny))
        rank = len(s)
        none = {"direction_u": np.zeros_like(u), "direction_r": np.zeros((rank, rank)), "direction_v": np.zeros_like(v)}
        return {**super().begin(problem, u * s, v), "u": u, "s": s, **none, "slope": np.array(0.0)}

    def iterate(self, problem: Completion, state: State) -> State:
        """Return the arrays after one step, or unchanged factors if no step lowers the residual."""
        observed, residual = problem.observed, state["residual"]
        point = FixedRankPoint(state["u"], state["s"], state["right"])
        descent = gradient(point, observed.times(residual, point.v), observed.transposed_times(residual, point.u))
        descent = horizontal(point, descent)
        slope, before = inner(point, descent, descent), float(state["slope"])
        old = Direction(state["direction_u"], state["direction_r"], state["direction_v"])
        direction = descent.plus(slope / before, old) if before else descent
        if before and inner(point, descent, direction) <= 0:
            direction = descent
        image = observed.sampled(
            np.hstack([direction.u * point.s + point.u @ direction.r, point.u * point.s]),
            np.hstack([point.v, direction.v]),
        )
        curvature = float(image @ image)
        step = max(0.0, float(residual @ image) / curvature) if curvature else 0.0
        energy, gain = float(state["norm"]) ** 2, 2 * inner(point, descent, direction)
        for _ in range(_HALVINGS):
            moved, left_turn, right_turn = retracted(point, direction, step)
            residual = observed.residual(moved.u * moved.s, moved.v)
            if float(residual @ residual) <= energy - _SUFFICIENT * step * gain:
                break
            step /= 2
        else:
            return {"slope": np.array(0.0)}
        search = transported(moved, direction, left_turn, right_turn)
        return {
            **{"left": moved.u * moved.s, "right": moved.v, "u": moved.u, "s": moved.s, "residual": residual},
            **{"direction_u": search.u, "direction_r": search.r, "direction_v": search.v, "slope": np.array(slope)},
        }
