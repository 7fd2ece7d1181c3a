"""Conjugate gradient iterative hard thresholding."""

from __future__ import annotations

from typing import Literal

from narrowcast.algorithms.completion.completion_problem import Completion
from narrowcast.algorithms.completion.factor_solver import State
from narrowcast.algorithms.completion.niht import HardThresholding, exact_step, grows, in_span
from narrowcast.platform.types import FloatArray

_LARGEST = 1e3


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
