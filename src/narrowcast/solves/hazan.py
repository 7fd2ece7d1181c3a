"""Hazan's algorithm: Frank-Wolfe over positive semidefinite matrices of bounded trace, one eigenvector an iteration.

An objective is a `SmoothObjective`. There are two: MAXCUT with its unit diagonal as a penalty, over matrices of trace
n, and completion over a nuclear-norm ball.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from pydantic import Field

from narrowcast.platform.config.files import Section
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.solving import Solver, StepResult, name_of
from narrowcast.platform.types import Arrays, FloatArray
from narrowcast.solves.completion_problems import Completion
from narrowcast.solves.factor_solver import check_completion, row_major
from narrowcast.solves.max_cut import MaxCut, unit_vectors
from narrowcast.solves.nuclear_norm import leading_eigenpair, leading_pair, radius_of
from narrowcast.solves.vector_kernels import weighted_sums


class Vertex(NamedTuple):
    """A matrix z z' of the feasible set, z [n], and a number that <gradient, S> is not below for any S of the set."""

    vector: FloatArray
    least: float


class SmoothObjective(Protocol):
    """A convex differentiable f(A(X)) of a linear image A(X) [q], over X = V V' [n, n] of a bounded trace."""

    @property
    def side(self) -> int:
        """The side n of X."""
        ...

    @property
    def scale(self) -> float:
        """A positive number that gaps are divided by."""
        ...

    def image(self, vectors: FloatArray) -> FloatArray:
        """Return A(V V') [q]; vectors [n, k]."""
        ...

    def value(self, image: FloatArray) -> float:
        """Return f."""
        ...

    def gradient(self, image: FloatArray) -> FloatArray:
        """Return the gradient of f with respect to the image [q]."""
        ...

    def vertex(self, gradient: FloatArray, random: np.random.Generator, tolerance: float, products: int) -> Vertex:
        """Return the rank-one matrix of the set with about the least <A*(gradient), z z'>, by Lanczos."""
        ...

    def exact_step(self, image: FloatArray, change: FloatArray) -> float:
        """Return the step in [0, 1] with the least f(image + step change)."""
        ...

    def dual(self, image: FloatArray) -> FloatArray:
        """Return the point of the dual problem that the gradient is, empty if there are no constraints."""
        ...


def quadratic_step(slope: float, curvature: float) -> float:
    """Return the minimiser in [0, 1] of slope t + curvature t^2 / 2."""
    if curvature <= 0:
        return 1.0 if slope < 0 else 0.0
    return min(1.0, max(0.0, -slope / curvature))


Penalty = Literal["quadratic", "soft_max"]
_HALVINGS = 60


@dataclass(frozen=True, eq=False)
class PenalisedCut:
    """<W, X> / 4 plus a penalty on the diagonal's errors e = diag(X) - 1, over X >= 0 of trace n.

    `quadratic`: weight |e|^2 / 2. `soft_max`: weight times (log sum_i (exp(M e_i) + exp(-M e_i)) - log(2 n)) / M, which
    is 0 at e = 0 and at most log(2 n) / M below the largest |e_i|; M is `sharpness`. The image is the diagonal and
    <W, X> / 4 [n + 1]. Half the weights less a lower bound on f bound the relaxation, whatever the weight.

    Source: Hazan, LATIN 2008, section 4, which has the soft maximum.
    """

    problem: MaxCut
    penalty: Penalty
    weight: float
    sharpness: float

    @property
    def side(self) -> int:
        """The vertices n."""
        return self.problem.graph.vertices

    @property
    def scale(self) -> float:
        """Half the sum of the absolute weights."""
        return float(np.abs(self.problem.graph.weights).sum()) / 4

    def image(self, vectors: FloatArray) -> FloatArray:
        """Return diagonal and objective [n + 1]."""
        return np.append(np.einsum("ik,ik->i", vectors, vectors), float(np.sum(vectors * self._times(vectors))) / 4)

    def value(self, image: FloatArray) -> float:
        """Return f."""
        error = image[:-1] - 1
        if self.penalty == "quadratic":
            return float(image[-1] + self.weight * (error @ error) / 2)
        errors = self.sharpness * np.concatenate([error, -error])
        top = float(errors.max())
        soft = top + math.log(np.exp(errors - top).sum()) - math.log(len(errors))
        return float(image[-1] + self.weight * soft / self.sharpness)

    def gradient(self, image: FloatArray) -> FloatArray:
        """Return what the diagonal and the objective are multiplied by [n + 1]."""
        error = image[:-1] - 1
        if self.penalty == "quadratic":
            return np.append(self.weight * error, 1.0)
        errors = self.sharpness * np.concatenate([error, -error])
        shares = np.exp(errors - errors.max())
        shares /= shares.sum()
        return np.append(self.weight * (shares[: len(error)] - shares[len(error) :]), 1.0)

    def vertex(self, gradient: FloatArray, random: np.random.Generator, tolerance: float, products: int) -> Vertex:
        """Return sqrt(n) times the least eigenvector of W / 4 + diag(gradient)."""
        diagonal = gradient[:-1]

        def product(x: FloatArray) -> FloatArray:
            return -(self._times(x[:, None])[:, 0] / 4 + diagonal * x)

        pair = leading_eigenpair(product, random.standard_normal(self.side), tolerance, products)
        return Vertex(math.sqrt(self.side) * pair.vector, -self.side * pair.above)

    def exact_step(self, image: FloatArray, change: FloatArray) -> float:
        """Return the minimiser of a parabola, or of a convex function by bisection of its slope."""
        if self.penalty == "quadratic":
            curvature = self.weight * float(change[:-1] @ change[:-1])
            return quadratic_step(float(self.gradient(image) @ change), curvature)
        low, high = 0.0, 1.0
        if self.gradient(image + change) @ change <= 0:
            return 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self.gradient(image + middle * change) @ change < 0:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def dual(self, image: FloatArray) -> FloatArray:
        """Return a point y [n] of the dual of the problem's `program`, of slack W / 4 - diag(y)."""
        return -self.gradient(image)[:-1]

    def _times(self, vectors: FloatArray) -> FloatArray:
        graph = self.problem.graph
        product: FloatArray = weighted_sums(graph.indptr, graph.indices, graph.weights, np.ascontiguousarray(vectors))
        return product


@dataclass(frozen=True, eq=False)
class EntryFit:
    """Half the squared error on the observed entries of X in [[W1, X], [X', W2]] of trace at most 2 radius.

    Some W1 and W2 make that matrix positive semidefinite if and only if the nuclear norm of X is at most `radius`. The
    side is m + n; the image is P_Omega(X) [p].

    Source: Fazel, Hindi and Boyd, ACC 2001; Jaggi and Sulovsky, ICML 2010.
    """

    problem: Completion
    radius: float

    @property
    def side(self) -> int:
        """Rows and columns, m + n."""
        return self.problem.observed.rows + self.problem.observed.columns

    @property
    def scale(self) -> float:
        """The value of X = 0."""
        return self.problem.observed.norm**2 / 2

    def image(self, vectors: FloatArray) -> FloatArray:
        """Return the observed entries of the upper right block of V V' [p]."""
        return self.problem.observed.sampled(*self._halves(vectors))

    def value(self, image: FloatArray) -> float:
        """Return half the squared error."""
        return float(np.sum((image - self.problem.observed.values) ** 2)) / 2

    def gradient(self, image: FloatArray) -> FloatArray:
        """Return the errors [p]."""
        return image - self.problem.observed.values

    def vertex(self, gradient: FloatArray, random: np.random.Generator, tolerance: float, products: int) -> Vertex:
        """Return sqrt(radius) (u, v) of the leading singular pair of minus the gradient."""
        observed = self.problem.observed
        start = random.standard_normal(observed.columns)
        pair = leading_pair(observed, -gradient, start, tolerance, products)
        vector = math.sqrt(self.radius) * np.concatenate([pair.left, pair.right])
        return Vertex(vector, -self.radius * pair.norm)

    def exact_step(self, image: FloatArray, change: FloatArray) -> float:
        """Return the minimiser of a parabola."""
        return quadratic_step(float(self.gradient(image) @ change), float(change @ change))

    def dual(self, image: FloatArray) -> FloatArray:
        """Return nothing, as there are no constraints."""
        del image
        return np.zeros(0)

    def _halves(self, vectors: FloatArray) -> tuple[FloatArray, FloatArray]:
        rows = self.problem.observed.rows
        return np.ascontiguousarray(vectors[:rows]), np.ascontiguousarray(vectors[rows:])


StepRule = Literal["one_over_k", "two_over_k_plus_two", "line_search"]
_SLACK = 32
"""Columns that the vectors may have beyond twice their rank before they are compressed."""
_NOTHING = 1e-8
"""Of the largest singular value of the vectors, below which one is rounding: its square is."""
_ROUNDING = 1e-14


class Hazan(Solver, Section):
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

    def step(self, problem: Any, state: Arrays) -> tuple[Arrays, StepResult]:
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
        return row_major(new), StepResult(gap, status)

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
