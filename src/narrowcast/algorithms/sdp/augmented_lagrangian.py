"""The augmented Lagrangian of a semidefinite program over X = V V': values, gradients and exact line searches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from narrowcast.algorithms.sdp.semidefinite_program import SemidefiniteProgram
from narrowcast.platform.types import FloatArray


@dataclass(frozen=True, eq=False)
class AugmentedLagrangian:
    """L(V) = <C, V V'> - <y, v> + s |v|^2 / 2 with the violations v = A(V V') - b; y = `dual` [m], s = `penalty`.

    Source: Burer and Monteiro, Mathematical Programming 95, 2003, section 4.
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
        none, one, two = program.violations(vectors), 2 * of(vectors, direction), of(direction)
        costs = program.cost @ direction
        rising = np.array([0.0, 2 * float(np.vdot(vectors, costs)), float(np.vdot(direction, costs)), 0.0, 0.0])
        rising[1] += float(one @ (self.penalty * none - self.dual))
        rising[2] += float(two @ (self.penalty * none - self.dual)) + self.penalty / 2 * float(one @ one)
        rising[3] += self.penalty * float(one @ two)
        rising[4] += self.penalty / 2 * float(two @ two)
        polynomial = np.polynomial.Polynomial(rising)
        roots = polynomial.deriv().roots()
        real = np.append(roots[np.abs(roots.imag) <= 1e-8 * (1 + np.abs(roots.real))].real, 0.0)
        return float(real[np.argmin(polynomial(real))])
