"""The Mixing method and Mixing++: one vertex's vector at a time, in closed form."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from narrowcast.platform.config.files import Section
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.solving import Solver, StepResult
from narrowcast.platform.types import Arrays, FloatArray
from narrowcast.solves.max_cut import MaxCut
from narrowcast.solves.semidefinite import pataki_rank, warn_of_low_rank
from narrowcast.solves.vector_kernels import chosen_updates, sweep, weighted_sums

Selection = Literal["cyclic", "uniform", "importance", "greedy"]
_LEAST_WINDOW = 8
"""Fewest iterations over which adaptive momentum measures the rate of convergence."""
_SPREAD = 1.2
"""Largest ratio of the decreases in two windows that counts as one rate."""
_FIRST_MOMENTUM, _MOST_MOMENTUM, _LOWERED = 0.45, 0.4999, 0.98


class Mixing(Solver, Section):
    """Replaces v_i by -(g_i / |g_i| + momentum v_i), normalised, where g_i = sum_j w_ij v_j; n updates an iteration.

    The residual is that of the first-order conditions, |g_i + |g_i| v_i| over |g_i|, both as norms over the vertices
    at the time of their update. Without momentum no update increases the objective.

    With `momentum` the method is, near a solution, overrelaxation of Gauss-Seidel by w = 1 / (1 - momentum), which
    needs w < 2. `adaptive` therefore chooses w by Young's formula from the measured rate: a rate r at w belongs to
    the factor p = (r + w - 1)^2 / (r w^2) of plain sweeps, for which w = 2 / (1 + sqrt(1 - p)) is the best. It is only
    raised, and lowered if the residual has grown.

    Source: Wang, Chang and Kolter, arXiv:1706.00476, algorithm 1; with momentum, the Mixing method++ of
    arXiv:2106.08775; `uniform`, `importance` and `greedy` of Erdogdu, Ozdaglar, Parrilo and Vanli, Mathematical
    Programming 195, 2022, section 3. Differs from the papers: 1. the first vectors are uniform on the sphere, not
    normalised points of a cube; 2. a vertex with g_i = 0 keeps its vector; 3. the momentum 0.45 of Mixing++'s code is
    a field, and `adaptive` is new; 4. norms and products are kept in trees, so that a chosen update costs
    O(degree (k + log n)).
    """

    kind: Literal["mixing"] = "mixing"
    rank: int | None = Field(None, ge=1, description="columns k of the vectors; null: the least k > sqrt(2 n)")
    selection: Selection = Field(
        "cyclic",
        description="order of the updates: in turn, drawn uniformly, drawn by |g_i|, or the largest decrease first",
    )
    momentum: Annotated[float, Field(ge=0, lt=0.5)] | Literal["adaptive"] = Field(
        0.0, description="weight of the previous vector in its update, below 0.5; adaptive: from the measured rate"
    )

    def check(self, problem: Any) -> None:
        """Raise `UserError` for another problem than MAXCUT, and for adaptive momentum of other than cyclic sweeps."""
        if not isinstance(problem, MaxCut):
            raise UserError(f"mixing solves problems of MAXCUT, not {problem.name}; use the problem max_cut")
        if self.momentum == "adaptive" and self.selection != "cyclic":
            raise UserError(f"adaptive momentum needs selection: cyclic, got {self.selection}; give it as a number")

    def init(self, problem: MaxCut, seed: int) -> Arrays:
        """Return vectors uniform on the sphere; warn of a rank that may be too low for a solution."""
        self.check(problem)
        size = problem.graph.vertices
        warn_of_low_rank(self.rank, pataki_rank(size))
        drawn = generator(seed, "mixing start").standard_normal((size, self.rank or math.isqrt(2 * size) + 1))
        return {
            "vectors": drawn / np.linalg.norm(drawn, axis=1, keepdims=True),
            "momentum": np.array(_FIRST_MOMENTUM if self.momentum == "adaptive" else self.momentum),
            "residuals": np.zeros(0),
            "iteration": np.array(0),
            "seed": np.array(seed, dtype=np.uint64),
        }

    def step(self, problem: MaxCut, state: Arrays) -> tuple[Arrays, StepResult]:
        """Return the state after n updates."""
        graph, vectors = problem.graph, state["vectors"]
        arrays = (graph.indptr, graph.indices, graph.weights, vectors)
        momentum, iteration = float(state["momentum"]), int(state["iteration"])
        if self.selection == "cyclic":
            error, scale = sweep(*arrays, np.arange(graph.vertices), momentum)
        else:
            random = generator(int(state["seed"]), "mixing order", iteration)
            if self.selection == "uniform":
                order = random.integers(0, graph.vertices, graph.vertices)
                error, scale = sweep(*arrays, order, momentum)
            else:
                sums, drawn = weighted_sums(*arrays), random.random(graph.vertices)
                greedy = self.selection == "greedy"
                error, scale = chosen_updates(*arrays, sums, drawn, greedy, momentum)
        residual = math.sqrt(error / scale) if scale else 0.0
        new = {**state, "vectors": vectors, "iteration": np.array(iteration + 1)}
        if self.momentum == "adaptive":
            new |= _adapted(momentum, np.append(state["residuals"], residual))
        return new, StepResult(residual, "converged" if residual == 0 else "running")

    def answer(self, state: Arrays) -> Arrays:
        """Return `vectors` [n, k], of unit norm."""
        return {"vectors": state["vectors"]}


def _adapted(momentum: float, residuals: FloatArray) -> Arrays:
    """Return the momentum of the next iteration, and the residuals since the last change or of the last window."""
    relaxation = 1 / (1 - momentum)
    window = _LEAST_WINDOW + math.ceil(1 / (2 - relaxation))  # a change decays by relaxation - 1 an iteration
    if len(residuals) < 2 * window + 1:
        return {"residuals": residuals}
    early, late = residuals[window] / residuals[0], residuals[-1] / residuals[window]
    if early > 1 and late > 1:
        return {"momentum": np.array(_LOWERED * momentum), "residuals": np.zeros(0)}
    rate = late ** (1 / window)
    if late < 1 and rate > relaxation - 1 and max(early, late) <= _SPREAD * min(early, late):
        plain = min((rate + relaxation - 1) ** 2 / (rate * relaxation**2), 1.0)
        best = 2 / (1 + math.sqrt(1 - plain))
        momentum = max(momentum, min(1 - 1 / best, _MOST_MOMENTUM))
        return {"momentum": np.array(momentum), "residuals": np.zeros(0)}
    return {"residuals": residuals[window:]}
