"""Accelerated factored gradient descent."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.completion.completion_problem import Completion
from narrowcast.algorithms.completion.factor_solver import FactorSolver, State
from narrowcast.algorithms.completion.lifted import Form, check_form, gradient, stacked, unstacked
from narrowcast.platform.types import FloatArray


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
