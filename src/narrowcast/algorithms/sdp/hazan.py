"""Hazan's algorithm: Frank-Wolfe over positive semidefinite matrices of bounded trace, one eigenvector an iteration."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.completion.completion_problem import Completion
from narrowcast.algorithms.completion.entry_fit import EntryFit
from narrowcast.algorithms.completion.nuclear_ball import radius_of
from narrowcast.algorithms.completion.solver_checks import check_completion, row_major
from narrowcast.algorithms.sdp.max_cut_problem import MaxCut, unit_vectors
from narrowcast.algorithms.sdp.penalised_cut import PenalisedCut, Penalty
from narrowcast.algorithms.sdp.smooth_objective import SmoothObjective
from narrowcast.platform.errors import UserError
from narrowcast.platform.section import Section
from narrowcast.platform.seeds import generator
from narrowcast.platform.solver_contracts import Report, name_of
from narrowcast.platform.types import Arrays, FloatArray

StepRule = Literal["one_over_k", "two_over_k_plus_two", "line_search"]
_SLACK = 32
"""Columns that the vectors may have beyond twice their rank before they are compressed."""
_NOTHING = 1e-8
"""Of the largest singular value of the vectors, below which one is rounding: its square is."""
_ROUNDING = 1e-14


class Hazan(Section):
    """X <- (1 - a) X + a z z', where z z' is the matrix of the set with the least product with the gradient.

    Completion problems are solved over the ball of nuclear norm `radius`, as matrices [[W1, X], [X', W2]] of trace at
    most 2 radius; MAXCUT over matrices of trace n with a penalty on the diagonal, whose rows are then scaled to unit
    norm. X = V V' is kept as V, a column an iteration, compressed to its rank when it has twice as many.

    The residual is (f(X) - B) / f(0), of MAXCUT over half the absolute weights, where B is the largest lower bound so
    far, f(Y) + <grad f(Y), S - Y> at its least over the set: the duality gap of Frank-Wolfe. For a smooth f it falls as
    1 / k.

    Source: Hazan, LATIN 2008, algorithm 1; completion as in Jaggi and Sulovsky, ICML 2010; steps 2 / (k + 2) and the
    gap of Jaggi, ICML 2013. Differs from the papers: 1. eigenvectors are computed to one tolerance, not to C / k^2, and
    their errors are added to B; 2. the constraints of MAXCUT are a penalty, not a feasibility problem for each value of
    the objective; 3. the first matrix is the best one of rank 1 for the gradient at 0, not an arbitrary one.
    """

    kind: Literal["hazan"] = "hazan"
    radius: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="largest nuclear norm of a completed matrix; null: an estimate from the data, with a warning",
    )
    step_rule: StepRule = Field(
        "line_search", description="step a of iteration k: 1/k, 2/(k + 2) counted from 0, or the best one"
    )
    penalty: Penalty = Field(
        "quadratic", description="penalty on the diagonal of MAXCUT: sum of squares, or the paper's soft maximum"
    )
    penalty_weight: float = Field(1.0, gt=0, allow_inf_nan=False, description="weight of the penalty of MAXCUT")
    sharpness: float = Field(100.0, gt=0, allow_inf_nan=False, description="M of the soft maximum")
    eigen_tolerance: float = Field(1e-5, gt=0, lt=1, description="relative residual at which Lanczos ends")
    eigen_products: int = Field(200, ge=2, description="most products of Lanczos in an iteration")

    def check(self, problem: Any) -> None:
        """Raise `UserError` for a problem without a bound on the trace, or a radius where that is known."""
        if isinstance(problem, MaxCut):
            if self.radius is not None:
                raise UserError(
                    f"solver.radius is {self.radius:g}, but the trace of {problem.name} is its number of vertices; "
                    "omit it"
                )
            return
        if not isinstance(problem, Completion):
            raise UserError(f"hazan solves matrix completion and MAXCUT, not {name_of(problem)}; choose another solver")
        check_completion(problem, 1)

    def init(self, problem: Any, seed: int) -> Arrays:
        """Return X of the first iteration, a matrix of rank 1."""
        self.check(problem)
        radius = 0.0
        if isinstance(problem, Completion):
            radius = radius_of(problem.observed, problem.rank, self.radius)
        objective = self._objective(problem, radius)
        nothing = np.zeros((objective.side, 1))
        at_zero = objective.image(nothing)
        random = generator(seed, "hazan lanczos", 0)
        vertex = objective.vertex(objective.gradient(at_zero), random, self.eigen_tolerance, self.eigen_products)
        vectors = vertex.vector[:, None]
        image = objective.image(vectors)
        return {
            "vectors": vectors,
            "image": image,
            "dual": objective.dual(image),
            "bound": np.array(objective.value(at_zero) - float(objective.gradient(at_zero) @ at_zero) + vertex.least),
            "radius": np.array(radius),
            "rows": np.array(problem.observed.rows if isinstance(problem, Completion) else 0),
            "rank": np.array(1),
            "iteration": np.array(0),
            "seed": np.array(seed, dtype=np.uint64),
        }

    def step(self, problem: Any, state: Arrays) -> tuple[Arrays, Report]:
        """Return the state after one eigenvector."""
        objective = self._objective(problem, float(state["radius"]))
        vectors, image, iteration = state["vectors"], state["image"], int(state["iteration"]) + 1
        gradient = objective.gradient(image)
        random = generator(int(state["seed"]), "hazan lanczos", iteration)
        vertex = objective.vertex(gradient, random, self.eigen_tolerance, self.eigen_products)
        bound = max(
            float(state["bound"]), objective.value(image) - float(gradient @ image) + vertex.least
        )  # f is convex
        column = vertex.vector[:, None]
        change = objective.image(column) - image
        length = self._length(objective, image, change, iteration)
        vectors = np.hstack([np.sqrt(1 - length) * vectors, np.sqrt(length) * column])
        image, rank = image + length * change, int(state["rank"])
        if vectors.shape[1] > 2 * rank + _SLACK:
            vectors = _compressed(vectors)
            image, rank = objective.image(vectors), vectors.shape[1]
        new = {**state, "vectors": vectors, "image": image, "dual": objective.dual(image)}
        new |= {"bound": np.array(bound), "rank": np.array(rank), "iteration": np.array(iteration)}
        gap = max(objective.value(image) - bound, 0.0) / objective.scale
        status: Any = "converged" if gap <= _ROUNDING else "running"
        return row_major(new), Report(gap, status)

    def answer(self, state: Arrays) -> Arrays:
        """Return the factors of a completed matrix and its `radius`, or unit vectors and the `dual` of MAXCUT."""
        vectors, rows = state["vectors"], int(state["rows"])
        if rows:
            left, right = (np.ascontiguousarray(half) for half in (vectors[:rows], vectors[rows:]))
            return {"left": left, "right": right, "radius": state["radius"]}
        return {"vectors": unit_vectors(vectors), "dual": state["dual"]}

    def _objective(self, problem: Any, radius: float) -> SmoothObjective:
        if isinstance(problem, MaxCut):
            return PenalisedCut(problem, self.penalty, self.penalty_weight, self.sharpness)
        return EntryFit(problem, radius)

    def _length(self, objective: SmoothObjective, image: FloatArray, change: FloatArray, iteration: int) -> float:
        if self.step_rule == "line_search":
            return objective.exact_step(image, change)
        return 1 / (iteration + 1) if self.step_rule == "one_over_k" else 2 / (iteration + 2)


def _compressed(vectors: FloatArray) -> FloatArray:
    """Return vectors with as many columns as their rank and the same V V'."""
    u, s, _ = np.linalg.svd(vectors, full_matrices=False)
    rank = int(np.count_nonzero(s > _NOTHING * s[0]))
    return np.asarray(u[:, :rank] * s[:rank])
