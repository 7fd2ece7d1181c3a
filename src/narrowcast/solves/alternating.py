"""Alternating fits of two factors: ALS with a ridge, power factorisation, and LMaFit with over-relaxation."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.platform.types import FloatArray
from narrowcast.solves.completion_problems import Completion
from narrowcast.solves.factor_solver import FactorSolver, State


class ALS(FactorSolver):
    """Alternates ridge regressions of the rows of the two factors.

    It is for matrices that are only nearly of low rank, such as ratings. The objective is the sum over the observed
    entries of (m_ij - <x_i, y_j>)^2 + a (|x_i|^2 + |y_j|^2), so that a row is decayed by its number of entries. 2 p k^2
    operations for the Gram matrices of all rows.

    Source: Zhou, Wilkinson, Schreiber and Pan, AAIM 2008, section 3.1 (ALS-WR). Differs from the paper: 1. the start is
    the leading singular triples, not the mean ratings and noise.
    """

    kind: Literal["als"] = "als"
    weight_decay: float = Field(
        0.1, ge=0, description="ridge a of an entry, in the unit of the squared factors; 0 is plain least squares"
    )

    def iterate(self, problem: Completion, state: State) -> State:
        """Return the factors after a regression of each, the left one first."""
        observed = problem.observed
        left = observed.row_fits(observed.values, state["right"], self.weight_decay)
        turned = observed.transposed
        right = turned.row_fits(turned.values, left, self.weight_decay)
        return {"left": left, "right": right, "residual": observed.residual(left, right)}


class PowerFactorisation(FactorSolver):
    """Alternates least squares in the two factors: rows of the one are fitted with the other fixed.

    The fixed factor is made orthonormal by QR, and the least squares are solved for the change of the other one, so
    that the normal equations lose no digits. 2 p k^2 operations for the Gram matrices of all rows.

    Source: Haldar and Hernando, IEEE Signal Processing Letters 16(7), 2009 (incremented-rank PowerFactorization with
    `continuation`).
    """

    kind: Literal["power_factorisation"] = "power_factorisation"

    def iterate(self, problem: Completion, state: State) -> State:
        """Return the factors after a least-squares fit of each, the left one first."""
        observed = problem.observed
        basis, triangle = np.linalg.qr(state["right"])
        left = state["left"] @ triangle.T
        left = left + observed.row_fits(state["residual"], basis)
        turned = observed.transposed
        left_basis, triangle = np.linalg.qr(left)
        right = basis @ triangle.T
        right = right + turned.row_fits(turned.residual(right, left_basis), left_basis)
        return {"left": left_basis, "right": right, "residual": observed.residual(left_basis, right)}


_GOOD = 0.7
"""Fall of the residual in an iteration below which the relaxation stays as it is."""


class LMaFit(FactorSolver):
    """Fits factors to a filled matrix, whose unseen entries follow the factors, with adaptive over-relaxation.

    With Z = X Y' + (1 + a) P_Omega(M - X Y'): X <- orth(Z Y), Y <- Z'X. The relaxation a grows while the residual falls
    slowly; an iteration that raises the residual is undone, and a starts from 0.

    Source: Wen, Yin and Zhang, Math. Prog. Comp. 4(4), 2012, algorithm 2 (LMaFit), with the constants of the authors'
    program. Differs from the paper: 1. Z is never formed; 2. with `continuation` the start is triples, and not X = 0,
    Y = I.
    """

    kind: Literal["lmafit"] = "lmafit"

    def start(self, problem: Completion, rank: int, seed: int) -> tuple[FloatArray, FloatArray]:
        """Return X = 0 and Y = I."""
        del seed
        return np.zeros((problem.observed.rows, rank)), np.eye(problem.observed.columns, rank)

    def begin(self, problem: Completion, left: FloatArray, right: FloatArray) -> State:
        """Return the arrays of a stage, without relaxation."""
        slots = {"relaxation": np.array(0.0), "increment": np.array(1.0)}
        return {**super().begin(problem, left, right), **slots}

    def iterate(self, problem: Completion, state: State) -> State:
        """Return the factors after a fit of each, or the old ones with the relaxation at 0."""
        observed, left, right = problem.observed, state["left"], state["right"]
        relaxation, increment = float(state["relaxation"]), float(state["increment"])
        values = (1 + relaxation) * state["residual"]
        basis = np.linalg.qr(observed.times(values, right) + left @ (right.T @ right))[0]
        fitted = observed.transposed_times(values, basis) + right @ (left.T @ basis)
        residual = observed.residual(basis, fitted)
        ratio = np.linalg.norm(residual) / max(float(state["norm"]), np.finfo(float).tiny)
        if ratio >= 1 and relaxation > 0:
            return {"relaxation": np.array(0.0), "increment": np.array(max(0.1 * relaxation, 0.1 * increment))}
        if ratio > _GOOD:
            increment = max(increment, 0.25 * relaxation)
            relaxation += increment
        slots = {"relaxation": np.array(relaxation), "increment": np.array(increment)}
        return {"left": basis, "right": fitted, "residual": residual, **slots}
