"""Low-rank matrix fitting by successive over-relaxation."""

from __future__ import annotations

from typing import Literal

import numpy as np

from narrowcast.algorithms.completion.completion_problem import Completion
from narrowcast.algorithms.completion.factor_solver import FactorSolver, State
from narrowcast.platform.types import FloatArray

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
