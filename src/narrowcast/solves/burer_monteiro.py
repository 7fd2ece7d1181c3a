"""The method of Burer and Monteiro: an augmented Lagrangian over the factor V of a semidefinite matrix X = V V'.

The rank of an answer can be reduced to the bound of Barvinok and Pataki, its constraints and objective kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import Field

from narrowcast.platform.config.files import Section
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.solving import Solver, StepResult
from narrowcast.platform.types import Arrays, FloatArray
from narrowcast.solves.certificate import least_eigenvector
from narrowcast.solves.semidefinite import SemidefiniteProgram, semidefinite_program_of, warn_of_low_rank


@dataclass(frozen=True, eq=False)
class AugmentedLagrangian:
    """L(V) = <C, V V'> - <y, v> + s |v|^2 / 2 with the violations v = A(V V') - b; y = `dual` [m], s = `penalty`.

    Its values, gradients and exact line searches. Source: Burer and Monteiro, Mathematical Programming 95, 2003,
    section 4.
    """

    program: SemidefiniteProgram
    dual: FloatArray
    penalty: float

    def value_and_gradient(self, vectors: FloatArray) -> tuple[float, FloatArray]:
        """Return L and its gradient 2 (C - A*(y - s v)) V [n, k]."""
        program = self.program
        violations = program.violations(vectors)
        costs = program.cost @ vectors
        value = float(np.vdot(vectors, costs)) + float(violations @ (self.penalty / 2 * violations - self.dual))
        pulled = program.constraints.adjoint(self.dual - self.penalty * violations) @ vectors
        return value, np.asarray(2 * (costs - pulled))

    def best_step(self, vectors: FloatArray, direction: FloatArray) -> float:
        """Return the t that minimises L(V + t D) over all t: a polynomial of degree four."""
        program, of = self.program, self.program.constraints.of_vectors
        constant, linear, square = program.violations(vectors), 2 * of(vectors, direction), of(direction)
        costs = program.cost @ direction
        rising = np.array([0.0, 2 * float(np.vdot(vectors, costs)), float(np.vdot(direction, costs)), 0.0, 0.0])
        rising[1] += float(linear @ (self.penalty * constant - self.dual))
        rising[2] += float(square @ (self.penalty * constant - self.dual)) + self.penalty / 2 * float(linear @ linear)
        rising[3] += self.penalty * float(linear @ square)
        rising[4] += self.penalty / 2 * float(square @ square)
        polynomial = np.polynomial.Polynomial(rising)
        roots = polynomial.deriv().roots()
        real = np.append(roots[np.abs(roots.imag) <= 1e-8 * (1 + np.abs(roots.real))].real, 0.0)
        return float(real[np.argmin(polynomial(real))])


_NO_DIRECTION = 1e-9
"""Of the largest singular value, below which a direction of the vectors is left out; it is squared in X."""


def reduce_rank(program: SemidefiniteProgram, vectors: FloatArray) -> FloatArray:
    """Return vectors [n, r] with r (r + 1) / 2 <= m whose A(V V') is that of `vectors`, and <C, V V'> no larger.

    While r (r + 1) / 2 > m there is a symmetric D with <A_i, V D V'> = 0 for all i, and I + t D turns singular at some
    t without an eigenvalue below zero. While r (r + 1) / 2 > m + 1 D can keep the objective too. In the last step the
    sign of D is such that the objective does not rise; at an optimum it is the same for both signs.

    Source: Barvinok, Discrete and Computational Geometry 13, 1995; Pataki, Mathematics of Operations Research 23, 1998.
    """
    left, sizes, _ = np.linalg.svd(vectors, full_matrices=False)
    reduced = np.asarray((left * sizes)[:, sizes > _NO_DIRECTION * sizes[0]])
    count = program.constraints.count
    while (pairs := reduced.shape[1] * (reduced.shape[1] + 1) // 2) > count:
        upper = np.triu_indices(reduced.shape[1])
        rows = [_inner_products(program, reduced)[:, *upper], (reduced.T @ (program.cost @ reduced))[None, *upper]]
        equations = np.concatenate(rows if pairs > count + 1 else rows[:1]) * np.where(upper[0] == upper[1], 1.0, 2.0)
        scale = np.linalg.norm(equations, axis=1, keepdims=True)
        basis, _ = np.linalg.qr((equations / np.where(scale == 0, 1.0, scale)).T, mode="complete")
        solution = np.zeros((reduced.shape[1],) * 2)
        solution[upper] = basis[:, -1]
        solution = solution + np.triu(solution, 1).T
        slope = float(np.sum(solution * (reduced.T @ (program.cost @ reduced))))
        values, rotation = np.linalg.eigh(solution)
        largest = _denominator(values, slope if pairs == count + 1 else 0.0)
        shrunk = np.sqrt(np.maximum(0.0, 1 - values / largest))
        reduced = (reduced @ rotation) * shrunk
        reduced = np.delete(reduced, np.argmin(shrunk), axis=1)
    return reduced


def _denominator(values: FloatArray, slope: float) -> float:
    """Return the eigenvalue l with which I - D / l is singular and positive, the objective not rising by -slope / l."""
    least, most = float(values[0]), float(values[-1])
    if slope > 0 and most > 0:
        return most
    if slope < 0 and least < 0:
        return least
    return most if most >= -least else least


def _inner_products(program: SemidefiniteProgram, vectors: FloatArray) -> FloatArray:
    """Return V' A_i V of every constraint [m, r, r]."""
    constraints, rank = program.constraints, vectors.shape[1]
    products = vectors[constraints.rows][:, :, None] * vectors[constraints.columns][:, None, :]
    off = (constraints.rows != constraints.columns)[:, None, None]
    symmetric = np.where(off, products + products.transpose(0, 2, 1), products)
    return np.asarray(constraints.values @ symmetric.reshape(len(symmetric), -1)).reshape(-1, rank, rank)


Perturbation = Literal["none", "noise", "curvature"]
_CORRECTIONS = 10
"""Pairs that L-BFGS remembers."""
_LEAST_GRADIENT = 1e-13
"""Relative to the cost, the smallest gradient that L-BFGS is asked for."""
_FIRST_GRADIENT, _SHARPENED = 1e-2, 0.3
"""Relative to the cost, the gradient that the first minimisation ends at, and what each iteration multiplies it by."""
_FADING = 0.5
"""Factor of the size of the noise from one iteration to the next."""
_STUCK, _LARGEST_TRACE = 0.9, 1e6
"""Ratio of |v| to the last one at which a proof of infeasibility is tried; the largest trace it is for, over V V's."""


class BurerMonteiro(Solver, Section):
    """Minimises <C, V V'> - <y, v> + s |v|^2 / 2, v = A(V V') - b, over V by L-BFGS, then sets y to y - s v.

    An iteration is one minimisation, of at most `inner_iterations` steps, and one update of y. The residual is the
    larger of |v| / (1 + max |b|) and |(C - A*(y)) V| / (1 + max |C|), in Frobenius norms. The answer is `vectors` V
    [n, k] and `dual` y [m], so that a problem proves a bound from it. With k (k + 1) / 2 > m, points of the second
    order are optimal for almost all C where the feasible V form a smooth manifold.

    The gradient (C - A*(y - s v)) V is zero in every column in which V is: from such a start the plain method never
    uses it, and neither would a term such as det(V'V), whose gradient is zero at that V. `noise` adds Gaussian noise to
    V before each minimisation, half as much each time. `curvature` adds the eigenvector of the least eigenvalue of the
    slack, if that is negative, to the column of least norm, by an exact line search.

    Source: Burer and Monteiro, Mathematical Programming 95, 2003; perturbations for 103, 2005, section 4; optimality by
    rank, Boumal, Voroninski and Bandeira, NeurIPS 2016. Differs from the papers: 1. y changes in every iteration, not
    only in those that reduce |v| enough, and s grows in the others if |v| is the larger residual; 2. L-BFGS-B of SciPy
    in place of their own with an exact line search; 3. the first penalty follows from the sizes of C, A and b; 4. noise
    or curvature in place of a determinant, for the reason above; 5. `reduce_below` makes the rank of the answer that of
    Barvinok and Pataki.
    """

    kind: Literal["burer_monteiro"] = "burer_monteiro"
    rank: int | None = Field(None, ge=1, description="columns k of V; null: the least with k (k + 1) / 2 > m, or n")
    start_rank: int | None = Field(
        None, ge=1, description="columns of the first V that are drawn, the others being zero; null: all"
    )
    perturbation: Perturbation = Field(
        "none", description="how saddle points are left: not at all, by noise, or along negative curvature"
    )
    noise: float = Field(0.1, gt=0, le=1, description="size of the first noise, relative to the entries of V")
    penalty: float | None = Field(None, gt=0, description="first penalty s; null: from the sizes of C, A and b")
    growth: float = Field(2.0, gt=1, le=100, description="factor of the penalty where |v| has not fallen enough")
    decrease: float = Field(0.25, gt=0, lt=1, description="ratio of |v| to the last one that is enough")
    inner_iterations: int = Field(300, ge=1, le=10**6, description="most L-BFGS steps of one minimisation")
    reduce_below: float | None = Field(
        None, gt=0, description="residual from which on the answer's rank r is reduced, r (r + 1) / 2 <= m; null: never"
    )

    def check(self, problem: Any) -> None:
        """Raise `UserError` for another problem than a semidefinite program, and for a rank above its side."""
        program = semidefinite_program_of(problem)
        if self.rank is not None and self.rank > program.constraints.size:
            size = program.constraints.size
            raise UserError(f"solver.rank is {self.rank}, but X is {size} x {size}; lower it to {size} or less")
        if self.start_rank is not None and self.start_rank > self._columns(program):
            raise UserError(f"solver.start_rank is {self.start_rank}; lower it to the rank {self._columns(program)}")

    def init(self, problem: Any, seed: int) -> Arrays:
        """Return a Gaussian V, scaled so that A(V V') is as near to b as it can be, and y = 0.

        Warn of a rank that may be too low.
        """
        self.check(problem)
        program = semidefinite_program_of(problem)
        warn_of_low_rank(self.rank, program.pataki_rank)
        vectors = generator(seed, "factor start").standard_normal((program.constraints.size, self._columns(program)))
        if self.start_rank is not None:
            vectors[:, self.start_rank :] = 0.0
        measured = program.constraints.of_vectors(vectors)
        scale = float(measured @ program.targets) / max(float(measured @ measured), np.finfo(float).tiny)
        vectors *= math.sqrt(scale) if scale > 0 else 1 / math.sqrt(vectors.shape[1])
        return {
            "vectors": vectors,
            "dual": np.zeros(program.constraints.count),
            "penalty": np.array(_first_penalty(program) if self.penalty is None else self.penalty),
            "violation": np.array(np.linalg.norm(program.violations(vectors))),
            "iteration": np.array(0),
            "seed": np.array(seed, dtype=np.uint64),
        }

    def step(self, problem: Any, state: Arrays) -> tuple[Arrays, StepResult]:
        """Return the state after one minimisation and one update of the multipliers.

        Raise `UserError` where the violations prove that nothing satisfies the constraints, or V that the objective is
        unbounded.
        """
        program, iteration = semidefinite_program_of(problem), int(state["iteration"])
        lagrangian = AugmentedLagrangian(program, state["dual"], float(state["penalty"]))
        start = self._perturbed(lagrangian, state)
        vectors = self._minimised(lagrangian, start, iteration)
        program.check_bounded(vectors)
        violations = program.violations(vectors)
        dual = state["dual"] - state["penalty"] * violations
        violation = float(np.linalg.norm(violations))
        slope = float(np.linalg.norm(program.cost @ vectors - program.constraints.adjoint(dual) @ vectors))
        largest = float(np.abs(program.targets).max()), float(np.abs(program.cost.data).max(initial=0.0))
        infeasible, unsteady = violation / (1 + largest[0]), slope / (1 + largest[1])
        residual = max(infeasible, unsteady)
        # A larger penalty cannot mend an inexact minimisation, and makes the next one harder.
        grows = violation > self.decrease * float(state["violation"]) and infeasible >= unsteady
        if grows and violation > _STUCK * float(state["violation"]):
            program.check_feasible(violations, _LARGEST_TRACE * float(np.sum(vectors**2)))
        new = {
            "vectors": vectors,
            "dual": dual,
            "penalty": np.array(float(state["penalty"]) * (self.growth if grows else 1)),
            "violation": np.array(violation),
            "iteration": np.array(iteration + 1),
            "seed": state["seed"],
        }
        if self.reduce_below is not None and residual <= self.reduce_below:
            new["reduced"] = reduce_rank(program, vectors)
        ended = np.array_equal(vectors, state["vectors"]) and np.array_equal(dual, state["dual"])
        return new, StepResult(residual, "stalled" if ended else "running")

    def answer(self, state: Arrays) -> Arrays:
        """Return `vectors` [n, k], of the reduced rank if they are, and `dual` [m]."""
        return {"vectors": state.get("reduced", state["vectors"]), "dual": state["dual"]}

    def _columns(self, program: SemidefiniteProgram) -> int:
        return min(program.constraints.size, program.pataki_rank + 1) if self.rank is None else self.rank

    def _perturbed(self, lagrangian: AugmentedLagrangian, state: Arrays) -> FloatArray:
        """Return the V that a minimisation begins with."""
        vectors, iteration = state["vectors"], int(state["iteration"])
        if self.perturbation == "noise":
            drawn = generator(int(state["seed"]), "factor noise", iteration).standard_normal(vectors.shape)
            return np.asarray(vectors + self.noise * _FADING**iteration * float(np.sqrt(np.mean(vectors**2))) * drawn)
        if self.perturbation == "curvature" and iteration:
            program = lagrangian.program
            least, vector = least_eigenvector(program.slack(state["dual"]))
            if least < 0:
                left, sizes, _ = np.linalg.svd(vectors, full_matrices=False)  # V Q has the same X
                turned = left * sizes
                direction = np.zeros(vectors.shape)
                direction[:, -1] = vector
                return np.asarray(turned + lagrangian.best_step(turned, direction) * direction)
        return np.asarray(vectors)

    def _minimised(self, lagrangian: AugmentedLagrangian, start: FloatArray, iteration: int) -> FloatArray:
        from scipy.optimize import minimize

        def value(flat: FloatArray) -> tuple[float, FloatArray]:
            objective, gradient = lagrangian.value_and_gradient(flat.reshape(start.shape))
            return objective, gradient.ravel()

        size = 1 + float(np.abs(lagrangian.program.cost.data).max(initial=0.0))
        steps = {
            "maxiter": self.inner_iterations,
            "maxfun": 2 * self.inner_iterations,
            "maxcor": _CORRECTIONS,
            "gtol": size * max(_LEAST_GRADIENT, _FIRST_GRADIENT * _SHARPENED**iteration),
            "ftol": 0.0,
        }
        minimum = minimize(value, start.ravel(), jac=True, method="L-BFGS-B", options=steps)
        return np.asarray(minimum.x).reshape(start.shape)


def _first_penalty(program: SemidefiniteProgram) -> float:
    """Return s for which the penalty and the objective have curvatures of one size: that of C over those of A and b."""
    cost = float(np.linalg.norm(program.cost.data)) / math.sqrt(program.constraints.size)
    matrices = float(np.sqrt(np.mean(np.square(program.constraints.values.data)) * program.constraints.values.nnz))
    matrices /= math.sqrt(program.constraints.count)
    targets = float(np.linalg.norm(program.targets)) / math.sqrt(program.constraints.count)
    return (cost or 1.0) / (matrices * (targets or 1.0))
