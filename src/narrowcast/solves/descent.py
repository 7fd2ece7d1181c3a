"""Gradient descent on the factors of a matrix: exact steps along one factor (ASD), and fixed steps along both.

ASD and its scaled form carry the residual along and compute it anew every `REFRESH` iterations. Factored gradient
descent (FGD, AFGD) moves two factors that are stacked into one, or the one factor of a positive semidefinite matrix.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from pydantic import Field

from narrowcast.platform.errors import UserError
from narrowcast.platform.types import FloatArray
from narrowcast.solves.completion_problems import Completion
from narrowcast.solves.factor_solver import FactorSolver, State
from narrowcast.solves.observed import ObservedMatrix

REFRESH = 50
"""Iterations between computations of the residual from the factors, which its updates drift from."""


def scaled(gradient: FloatArray, factor: FloatArray) -> FloatArray:
    """Return gradient (factor' factor)^-1 [m, k], the Gram matrix raised by 1e-15 of its mean diagonal."""
    gram = factor.T @ factor
    size = np.trace(gram) / len(gram)
    gram[np.diag_indices_from(gram)] += 1e-15 * size
    try:
        return np.asarray(np.linalg.solve(gram, gradient.T).T, dtype=np.float64)
    except np.linalg.LinAlgError:
        return gradient / size if size else gradient


def left_step(
    observed: ObservedMatrix, left: FloatArray, right: FloatArray, residual: FloatArray, *, scale: bool
) -> tuple[FloatArray, FloatArray]:
    """Return left and residual after the exact step of least squares along the gradient of left, scaled or not."""
    gradient = observed.times(residual, right)
    direction = scaled(gradient, right) if scale else gradient
    return _stepped(left, residual, direction, gradient, observed.sampled(direction, right))


def right_step(
    observed: ObservedMatrix, left: FloatArray, right: FloatArray, residual: FloatArray, *, scale: bool
) -> tuple[FloatArray, FloatArray]:
    """Return right and residual after the exact step of least squares along the gradient of right, scaled or not."""
    gradient = observed.transposed_times(residual, left)
    direction = scaled(gradient, left) if scale else gradient
    return _stepped(right, residual, direction, gradient, observed.sampled(left, direction))


def _stepped(
    factor: FloatArray, residual: FloatArray, direction: FloatArray, gradient: FloatArray, change: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return a factor after the exact step, and the residual; `change` is that of the entries by `direction`."""
    curvature = float(change @ change)
    step = float(np.vdot(direction, gradient)) / curvature if curvature > 0 else 0.0
    return factor + step * direction, np.subtract(residual, step * change, out=residual)


def alternating_step(problem: Completion, state: State, *, scale: bool) -> State:
    """Return both factors and the residual after a step of each, scaled or not."""
    observed, left, right, residual = problem.observed, state["left"], state["right"], state["residual"]
    if int(state["iterations"]) % REFRESH == REFRESH - 1:
        residual = observed.residual(left, right)
    left, residual = left_step(observed, left, right, residual, scale=scale)
    right, residual = right_step(observed, left, right, residual, scale=scale)
    return {"left": left, "right": right, "residual": residual}


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


Form = Literal["rectangular", "psd"]


def check_form(problem: Completion, form: Form) -> None:
    """Raise `UserError` for `form = psd` if the matrix is not symmetric."""
    if form == "psd" and not problem.symmetric:
        raise UserError(f'{problem.name} is not symmetric; use form "rectangular", or a problem with symmetric=true')


def stacked(left: FloatArray, right: FloatArray, form: Form) -> FloatArray:
    """Return [left; right] as one factor, or their mean for a positive semidefinite matrix."""
    return (left + right) / 2 if form == "psd" else np.vstack([left, right])


def unstacked(problem: Completion, factor: FloatArray, form: Form) -> tuple[FloatArray, FloatArray]:
    """Return left and right of a stacked factor."""
    return (factor, factor) if form == "psd" else (factor[: problem.observed.rows], factor[problem.observed.rows :])


def gradient(problem: Completion, factor: FloatArray, residual: FloatArray, form: Form) -> FloatArray:
    """Return the gradient at a stacked factor with this residual D, q being the observed share.

    psd: that of ||D||^2 / (2 q) in U, -2 D U / q. rectangular: that of ||D||^2 / q + ||L'L - R'R||^2 / 4 in [L; R],
    whose minimisers are balanced.
    """
    observed = problem.observed
    left, right = unstacked(problem, factor, form)
    if form == "psd":
        return -2 / observed.fraction * observed.times(residual, right)
    unbalanced = left.T @ left - right.T @ right
    scale = 2 / observed.fraction
    return np.vstack(
        [
            left @ unbalanced - scale * observed.times(residual, right),
            -(right @ unbalanced) - scale * observed.transposed_times(residual, left),
        ]
    )


class FGD(FactorSolver):
    """Gradient descent on the factors, with one step size for the whole run.

    psd: U <- U - eta grad, grad = -2 D U / q, q being the observed share, for M = U U'. rectangular: the same on [L; R]
    with a term that keeps L'L = R'R. eta = `step_size` / sigma_1 of the start.

    Source: Bhojanapalli, Kyrillidis and Sanghavi, COLT 2016 (FGD); Park, Kyrillidis, Caramanis and Sanghavi, SIAM J.
    Imaging Sci. 11(4), 2018 (BFGD). Differs from the paper: 1. the step size does not contain the norm of the gradient.
    """

    kind: Literal["fgd"] = "fgd"
    form: Form = Field("rectangular", description="L R' of any matrix, or U U' of a positive semidefinite one")
    step_size: float = Field(0.2, gt=0, le=1, description="step size, relative to 1 / sigma_1 of the start")

    def check(self, problem: Any) -> None:
        """Raise `UserError` also if the form does not fit the problem."""
        super().check(problem)
        check_form(problem, self.form)

    def begin(self, problem: Completion, left: FloatArray, right: FloatArray) -> State:
        """Return the arrays of a stage, with its step size."""
        left, right = unstacked(problem, stacked(left, right, self.form), self.form)
        largest = max(float(np.linalg.norm(left, 2)) ** 2, np.finfo(float).tiny)
        return {**super().begin(problem, left, right), "eta": np.array(self.step_size / largest)}

    def iterate(self, problem: Completion, state: State) -> State:
        """Return the factors after one step."""
        factor = stacked(state["left"], state["right"], self.form)
        factor = factor - float(state["eta"]) * gradient(problem, factor, state["residual"], self.form)
        left, right = unstacked(problem, factor, self.form)
        return {"left": left, "right": right, "residual": problem.observed.residual(left, right)}


class AFGD(FactorSolver):
    """Factored gradient descent with Nesterov's acceleration, on the set where the objective is strongly convex.

    U = (a V + W) / (1 + a); V <- proj((1 - a) V + a U - (eta / a) grad(U)) onto {V: U_0'V >= 0}; W <- U - eta grad(U),
    rotated towards the start U_0. The answer is W. U_0 is a factor of a positive semidefinite matrix, or [L; R].

    Source: Zhou, Cao and Gu, AISTATS 2020, algorithm 1 (AFGD). Differs from the paper: 1. the form is the rectangular
    one; 2. the projection is that onto the symmetric U_0'V in closed form, whose negative eigenvalues are then clipped.
    """

    kind: Literal["afgd"] = "afgd"
    form: Form = Field("rectangular", description="L R' of any matrix, or U U' of a positive semidefinite one")
    step_size: float = Field(0.2, gt=0, le=1, description="step size, relative to 1 / sigma_1 of the start")
    momentum: float = Field(0.2, gt=0, lt=1, description="a = sqrt(eta gamma), gamma being the strong convexity")

    def check(self, problem: Any) -> None:
        """Raise `UserError` also if the form does not fit the problem."""
        super().check(problem)
        check_form(problem, self.form)

    def begin(self, problem: Completion, left: FloatArray, right: FloatArray) -> State:
        """Return the arrays of a stage: U_0, V = W = U_0 and the step size."""
        start = stacked(left, right, self.form)
        left, right = unstacked(problem, start, self.form)
        largest = max(float(np.linalg.norm(left, 2)) ** 2, np.finfo(float).tiny)
        slots = {"eta": np.array(self.step_size / largest), "origin": start, "average": start.copy()}
        return {**super().begin(problem, left, right), **slots}

    def iterate(self, problem: Completion, state: State) -> State:
        """Return W, V and the residual of W after one iteration."""
        a, eta, origin = self.momentum, float(state["eta"]), state["origin"]
        w, v = stacked(state["left"], state["right"], self.form), state["average"]
        u = (a * v + w) / (1 + a)
        slope = gradient(problem, u, problem.observed.residual(*unstacked(problem, u, self.form)), self.form)
        v = projected((1 - a) * v + a * u - eta / a * slope, origin)
        left, right = unstacked(problem, rotated(u - eta * slope, origin), self.form)
        return {"left": left, "right": right, "average": v, "residual": problem.observed.residual(left, right)}


def projected(v: FloatArray, origin: FloatArray) -> FloatArray:
    """Return the Z nearest to v [n, k] with origin'Z symmetric and positive semidefinite.

    With origin = P diag(d) Q', Z differs from v in P'Z = diag(1 / d) S Q' alone, S being symmetric. Exact if the
    nearest symmetric S has no negative eigenvalue; those are set to 0.
    """
    p, d, qt = np.linalg.svd(origin, full_matrices=False)
    if d[-1] <= math.sqrt(np.finfo(float).eps) * d[0]:
        return v
    inside = p.T @ v
    t = inside @ qt.T
    weighted = t / d[:, None]
    values, vectors = np.linalg.eigh((weighted + weighted.T) / (d[:, None] ** -2 + d[None, :] ** -2))
    s = (vectors * values.clip(min=0)) @ vectors.T
    return v + p @ ((s / d[:, None]) @ qt - inside)


def rotated(x: FloatArray, origin: FloatArray) -> FloatArray:
    """Return x times the rotation that brings it nearest to the origin."""
    a, _, bt = np.linalg.svd(x.T @ origin)
    return x @ (a @ bt)
