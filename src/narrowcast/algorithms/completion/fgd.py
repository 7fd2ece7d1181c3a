"""Factored gradient descent."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.completion.completion_problem import Completion
from narrowcast.algorithms.completion.factor_solver import FactorSolver, State
from narrowcast.algorithms.completion.lifted import Form, check_form, gradient, stacked, unstacked
from narrowcast.platform.types import FloatArray


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
