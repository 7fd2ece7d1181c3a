"""Frank-Wolfe with in-face directions: completion over a nuclear-norm ball by steps that keep or lower the rank.

The iterate is kept as a thin singular value decomposition, which a step changes by a matrix of rank 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from narrowcast.platform.config.files import Section
from narrowcast.platform.seeds import generator
from narrowcast.platform.solving import Solver, StepResult
from narrowcast.platform.types import Arrays, FloatArray
from narrowcast.solves.completion_problems import Completion
from narrowcast.solves.factor_solver import check_completion, row_major
from narrowcast.solves.nuclear_norm import SingularPair, leading_pair, radius_of
from narrowcast.solves.observed import ObservedMatrix

_NOTHING = 1e-13
"""Of the largest singular value, below which one is rounding."""


class ThinSVD(NamedTuple):
    """U diag(s) V' with orthonormal columns: left [m, r], s [r] descending and positive, right [n, r]."""

    left: FloatArray
    s: FloatArray
    right: FloatArray

    @property
    def factors(self) -> tuple[FloatArray, FloatArray]:
        """U diag(s) [m, r] and V [n, r]."""
        return self.left * self.s, self.right

    def plus_rank_one(self, scale: float, u: FloatArray, v: FloatArray) -> ThinSVD:
        """Return the decomposition of scale U diag(s) V' + u v', in O((m + n) r^2).

        Source: Brand, Linear Algebra and its Applications 415(1), 2006, section 3.
        """
        left, p = _with_direction(self.left, u)
        right, q = _with_direction(self.right, v)
        core = np.outer(p, q)
        diagonal = np.arange(len(self.s))
        core[diagonal, diagonal] += scale * self.s
        inner, s, outer = np.linalg.svd(core)
        return _kept(left, inner, s, right, outer.T, len(s))

    def within_face(self, core: FloatArray, most: int) -> ThinSVD:
        """Return the decomposition of U core V' for a positive semidefinite core [r, r], of rank at most `most`."""
        values, vectors = np.linalg.eigh(core)
        down = np.argsort(-values, kind="stable")
        return _kept(self.left, vectors[:, down], values[down], self.right, vectors[:, down], most)

    def orthonormal(self) -> ThinSVD:
        """Return the same matrix with the rounding errors of many changes removed from its vectors."""
        left, inner = np.linalg.qr(self.left)
        right, outer = np.linalg.qr(self.right)
        u, s, vt = np.linalg.svd((inner * self.s) @ outer.T)
        return _kept(left, u, s, right, vt.T, len(s))


def _with_direction(basis: FloatArray, vector: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the basis with the part of a vector that is orthogonal to it, and the vector's coordinates."""
    along = basis.T @ vector
    rest = vector - basis @ along
    again = basis.T @ rest  # one projection is not orthogonal where the vector is nearly in the span
    rest = rest - basis @ again
    length = float(np.linalg.norm(rest))
    if length <= _NOTHING * float(np.linalg.norm(vector)) or basis.shape[1] == len(vector):
        return basis, along + again
    return np.column_stack([basis, rest / length]), np.append(along + again, length)


def _kept(
    left: FloatArray, inner: FloatArray, s: FloatArray, right: FloatArray, outer: FloatArray, most: int
) -> ThinSVD:
    rank = max(1, min(most, int(np.count_nonzero(s > _NOTHING * s[0]))))
    return ThinSVD(left @ inner[:, :rank], s[:rank].copy(), right @ outer[:, :rank])


_BOUNDARY = 1e-6
"""Of the radius: a nuclear norm that is nearer to it is on the boundary."""
_REACHED = 1e-8
"""Of the radius: how far within the ball a full step from its interior ends, so that rounding leaves it inside."""
_REFRESHED = 64
"""Iterations after which the fitted values are computed anew from the factors."""
_ROUNDING = 1e-14


@dataclass(frozen=True)
class _InFace:
    """A direction within the minimal face: the change of the fitted values [p], and the longest step.

    `core` is the unit vector m [r] of the point U m m' V' to move away from on the boundary, None in the interior.
    """

    change: FloatArray
    longest: float
    core: FloatArray | None


class InFaceFrankWolfe(Solver, Section):
    """Minimises |P_Omega(X - M)|^2 / 2 over matrices of nuclear norm at most `radius`, kept as a thin SVD.

    An iteration moves away from the worst point of the face that X is in, as far as the next smaller face (full step,
    which lowers the rank by one on the boundary) or as far as is best (partial step), if 1 / (f - B) grows enough; B is
    the best lower bound on the minimum so far. Otherwise it is a Frank-Wolfe step with exact line search.

    The residual is (f(X) - B) / f(0), a certificate of optimality. Errors of Lanczos are added to B.

    Source: Freund, Grigas and Mazumder, SIAM J. Optim. 27(1), 2017, algorithm 3 with rule IF-(gamma_1, gamma_2).
    Differs from the paper: 1. gamma_1 = 0 and gamma_2 infinite are the defaults; 2. no optimisation over whole faces
    (IF-Optimization); 3. the boundary is met to 1e-6 of the radius, not to 1e-3 in the unit of the data; 4. Lanczos
    starts at random in every iteration.
    """

    kind: Literal["in_face_frank_wolfe"] = "in_face_frank_wolfe"
    radius: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="largest nuclear norm; null: an estimate from the data, with a warning",
    )
    full_gain: float | None = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="gamma_1: a full in-face step is taken if 1/(f - B) grows by this over 8 radius^2; null: never",
    )
    partial_gain: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="gamma_2: the same of a partial in-face step; null: never. Both null is plain Frank-Wolfe",
    )
    eigen_tolerance: float = Field(1e-5, gt=0, lt=1, description="relative residual at which Lanczos ends")
    eigen_products: int = Field(200, ge=2, description="most products of Lanczos in an iteration")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.full_gain is not None and self.partial_gain is not None and self.partial_gain < self.full_gain:
            raise ValueError(f"partial_gain is {self.partial_gain:g}, below full_gain {self.full_gain:g}; raise it")
        return self

    def check(self, problem: Any) -> None:
        """Raise `UserError` if the problem is not a completion problem."""
        check_completion(problem, 1)

    def init(self, problem: Completion, seed: int) -> Arrays:
        """Return the best matrix of rank 1 on the boundary for the gradient at 0."""
        self.check(problem)
        observed = problem.observed
        radius = radius_of(observed, problem.rank, self.radius)
        pair = self._pair(observed, observed.values, seed, 0)
        svd = ThinSVD(pair.left[:, None], np.array([radius]), pair.right[:, None])
        return row_major(
            {
                **svd._asdict(),
                "fitted": observed.sampled(*svd.factors),
                "bound": np.array(max(0.0, observed.norm**2 / 2 - radius * pair.norm)),
                "radius": np.array(radius),
                "steps": np.zeros(3, dtype=np.int64),
                "iteration": np.array(0),
                "seed": np.array(seed, dtype=np.uint64),
            }
        )

    def step(self, problem: Completion, state: Arrays) -> tuple[Arrays, StepResult]:
        """Return the state after one step; `steps` counts full, partial and Frank-Wolfe steps."""
        observed, radius = problem.observed, float(state["radius"])
        svd, fitted = ThinSVD(state["left"], state["s"], state["right"]), state["fitted"]
        iteration = int(state["iteration"]) + 1
        residual, scale = observed.values - fitted, observed.norm**2 / 2
        objective = _half_square(residual)
        pair = self._pair(observed, residual, int(state["seed"]), iteration)
        bound = max(float(state["bound"]), objective + float(residual @ fitted) - radius * pair.norm)
        svd, fitted, taken = self._moved(observed, svd, fitted, residual, pair, bound, radius)
        if iteration % _REFRESHED == 0:
            svd = svd.orthonormal()
            fitted = observed.sampled(*svd.factors)
        steps = state["steps"].copy()
        steps[taken] += 1
        gap = max(_half_square(observed.values - fitted) - bound, 0.0) / scale
        new = {**state, **svd._asdict(), "fitted": fitted, "bound": np.array(bound)}
        new |= {"steps": steps, "iteration": np.array(iteration)}
        return row_major(new), StepResult(gap, "converged" if gap <= _ROUNDING else "running")

    def answer(self, state: Arrays) -> Arrays:
        """Return `left` [m, r], `right` [n, r] and `radius`, by which the problem computes gap and rank."""
        left, right = ThinSVD(state["left"], state["s"], state["right"]).factors
        return {"left": left, "right": right, "radius": state["radius"]}

    def _pair(self, observed: ObservedMatrix, residual: FloatArray, seed: int, iteration: int) -> SingularPair:
        start = generator(seed, "in-face lanczos", iteration).standard_normal(observed.columns)
        return leading_pair(observed, residual, start, self.eigen_tolerance, self.eigen_products)

    def _moved(
        self,
        observed: ObservedMatrix,
        svd: ThinSVD,
        fitted: FloatArray,
        residual: FloatArray,
        pair: SingularPair,
        bound: float,
        radius: float,
    ) -> tuple[ThinSVD, FloatArray, int]:
        """Return the matrix after a step, its fitted values, and the index of the step's kind in `steps`."""
        vertex = radius * observed.sampled(pair.left[:, None], pair.right[:, None])
        face = self._in_face(observed, svd, fitted, residual, vertex, pair, radius)
        if face is not None:
            best = min(_exact_step(residual, face.change), face.longest)
            unit = 1 / (8 * radius**2)
            now = _inverse(_half_square(residual) - bound)
            for index, (gain, length) in enumerate(((self.full_gain, face.longest), (self.partial_gain, best))):
                left_over = _half_square(residual - length * face.change) - bound
                if gain is not None and _inverse(left_over) >= now + gain * unit:
                    full = index == 0
                    return _within(svd, face, length, pair, radius, full), fitted + length * face.change, index
        change = vertex - fitted
        length = min(1.0, _exact_step(residual, change))
        moved = svd.plus_rank_one(1 - length, length * radius * pair.left, pair.right)
        return moved, fitted + length * change, 2

    def _in_face(
        self,
        observed: ObservedMatrix,
        svd: ThinSVD,
        fitted: FloatArray,
        residual: FloatArray,
        vertex: FloatArray,
        pair: SingularPair,
        radius: float,
    ) -> _InFace | None:
        """Return the in-face direction, None if the face is a point or no such step is wanted."""
        if self.full_gain is None and self.partial_gain is None:
            return None
        if svd.s.sum() < (1 - _BOUNDARY) * radius:
            return _InFace(fitted + vertex, _longest_inside(svd, pair, radius), None)
        if len(svd.s) == 1:
            return None
        inner = svd.left.T @ observed.times(residual, svd.right)
        core = np.linalg.eigh((inner + inner.T) / 2)[1][:, 0]
        away = radius * observed.sampled((svd.left @ core)[:, None], (svd.right @ core)[:, None])
        room = radius * float(core**2 @ (1 / svd.s)) - 1
        return _InFace(fitted - away, 1 / room, core) if room > 0 else None


def _within(svd: ThinSVD, face: _InFace, length: float, pair: SingularPair, radius: float, full: bool) -> ThinSVD:
    """Return the matrix after an in-face step of this length."""
    if face.core is None:
        return svd.plus_rank_one(1 + length, length * radius * pair.left, pair.right)
    core = np.diag((1 + length) * svd.s) - length * radius * np.outer(face.core, face.core)
    return svd.within_face(core, len(svd.s) - full)


def _longest_inside(svd: ThinSVD, pair: SingularPair, radius: float) -> float:
    """Return the step a at which (1 + a) X + a radius u v' is on the boundary, for X in the interior."""
    from scipy.optimize import brentq

    def room(length: float) -> float:
        moved = svd.plus_rank_one(1 + length, length * radius * pair.left, pair.right)
        return (1 - _REACHED) * radius - float(moved.s.sum())

    high = 1.0
    while room(high) > 0:
        high *= 2
    return float(brentq(room, 0.0, high, xtol=1e-12, rtol=1e-10))


def _half_square(residual: FloatArray) -> float:
    return float(residual @ residual) / 2


def _exact_step(residual: FloatArray, change: FloatArray) -> float:
    """Return the step along a change of the fitted values that lowers the squared residual most, at least 0."""
    size = float(change @ change)
    return max(0.0, float(residual @ change) / size) if size else 0.0


def _inverse(value: float) -> float:
    return 1 / value if value > 0 else math.inf
