"""R3MC: Riemannian conjugate gradients on three factors."""

from __future__ import annotations

from typing import Literal

import numpy as np

from narrowcast.algorithms.completion.completion_problem import Completion
from narrowcast.algorithms.completion.factor_solver import FactorSolver, State
from narrowcast.algorithms.completion.low_rank_matrix import truncated
from narrowcast.algorithms.completion.quotient_geometry import (
    Direction,
    FixedRankPoint,
    gradient,
    horizontal,
    inner,
    retracted,
    transported,
)
from narrowcast.platform.types import FloatArray

_SUFFICIENT = 1e-4
_HALVINGS = 20


class R3MC(FactorSolver):
    """Nonlinear conjugate gradients over matrices U R V' of fixed rank, under a metric that takes out their scale.

    Steps are exact for the linearised problem and halved until the residual falls enough (Armijo, 1e-4); directions by
    Fletcher and Reeves, anew along the gradient where they would ascend.

    Source: Mishra and Sepulchre, arXiv:1306.2672, algorithm 1; with `continuation`, its rank updates. Differs from the
    paper: 1. R is kept diagonal, so that Lyapunov equations are solved entry by entry; 2. the transported direction is
    not rescaled.
    """

    kind: Literal["r3mc"] = "r3mc"

    def begin(self, problem: Completion, left: FloatArray, right: FloatArray) -> State:
        """Return the arrays of a stage; left is U diag(s)."""
        u, s, v = truncated(left, right, left.shape[1])
        s = np.maximum(s, np.finfo(float).eps * max(float(s[0]), np.finfo(float).tiny))
        rank = len(s)
        none = {"direction_u": np.zeros_like(u), "direction_r": np.zeros((rank, rank)), "direction_v": np.zeros_like(v)}
        return {**super().begin(problem, u * s, v), "u": u, "s": s, **none, "slope": np.array(0.0)}

    def iterate(self, problem: Completion, state: State) -> State:
        """Return the arrays after one step, or unchanged factors if no step lowers the residual."""
        observed, residual = problem.observed, state["residual"]
        point = FixedRankPoint(state["u"], state["s"], state["right"])
        descent = gradient(point, observed.times(residual, point.v), observed.transposed_times(residual, point.u))
        descent = horizontal(point, descent)
        slope, before = inner(point, descent, descent), float(state["slope"])
        old = Direction(state["direction_u"], state["direction_r"], state["direction_v"])
        direction = descent.plus(slope / before, old) if before else descent
        if before and inner(point, descent, direction) <= 0:
            direction = descent
        image = observed.sampled(
            np.hstack([direction.u * point.s + point.u @ direction.r, point.u * point.s]),
            np.hstack([point.v, direction.v]),
        )
        curvature = float(image @ image)
        step = max(0.0, float(residual @ image) / curvature) if curvature else 0.0
        energy, gain = float(state["norm"]) ** 2, 2 * inner(point, descent, direction)
        for _ in range(_HALVINGS):
            moved, left_turn, right_turn = retracted(point, direction, step)
            residual = observed.residual(moved.u * moved.s, moved.v)
            if float(residual @ residual) <= energy - _SUFFICIENT * step * gain:
                break
            step /= 2
        else:
            return {"slope": np.array(0.0)}
        kept = transported(moved, direction, left_turn, right_turn)
        return {
            **{"left": moved.u * moved.s, "right": moved.v, "u": moved.u, "s": moved.s, "residual": residual},
            **{"direction_u": kept.u, "direction_r": kept.r, "direction_v": kept.v, "slope": np.array(slope)},
        }
