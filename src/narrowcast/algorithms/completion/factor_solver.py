"""The common part of solvers on two factors: the spectral start, rank continuation, progress and the answer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.completion.completion_problem import Completion
from narrowcast.algorithms.completion.continuation import Continuation, next_triples
from narrowcast.algorithms.completion.low_rank_matrix import Triples
from narrowcast.algorithms.completion.residual_progress import PROGRESS, ROUNDING, progress
from narrowcast.algorithms.completion.solver_checks import check_completion, rank_of, row_major
from narrowcast.platform.section import Section
from narrowcast.platform.solver_contracts import Report
from narrowcast.platform.types import Arrays, FloatArray

State = dict[str, NDArray[Any]]


class FactorSolver(Section):
    """Fields and steps of solvers whose iterate is left right', left [m, k] and right [n, k].

    A solver implements `iterate`, and `begin` if it keeps more than the factors and the residual D = P_Omega(M - left
    right') [p]. Solvers start from the leading singular triples of P_Omega(M) / p, with the square roots of the values
    on both sides.
    """

    rank: int | None = Field(None, ge=1, description="rank of the answer; null: that of the problem, where it is known")
    continuation: Continuation | None = Field(
        None, description="rank continuation; null: all of the rank from the start"
    )

    def check(self, problem: Any) -> None:
        """Raise `UserError` if the problem is no completion problem or has no matrix of this rank."""
        check_completion(problem, self.rank)

    def init(self, problem: Completion, seed: int) -> Arrays:
        """Return the start, or the stage of the first triples above the noise with rank continuation."""
        self.check(problem)
        if self.continuation is None:
            return self._stage(problem, *self.start(problem, rank_of(problem, self.rank), seed), seed, 0)
        observed = problem.observed
        empty = np.empty((observed.rows, 0)), np.empty((observed.columns, 0))
        return self._grown(problem, *empty, observed.values, seed, 0)

    def step(self, problem: Completion, state: Arrays) -> tuple[Arrays, Report]:
        """Return the state after one iteration of the current rank, and after the end of its stage."""
        before = float(state["norm"])
        new = row_major({**state, **self.iterate(problem, dict(state))})
        norm = float(np.linalg.norm(new["residual"]))
        new["norm"] = np.array(norm)
        new["iterations"] = np.asarray(state["iterations"] + 1)
        rank, fitted = rank_of(problem, self.rank), norm <= ROUNDING * problem.observed.norm
        if self.continuation is not None and new["left"].shape[1] < rank and not fitted:
            if np.isfinite(norm) and self.continuation.is_over(before, norm, int(new["iterations"])):
                stage = int(state["stage"]) + 1
                new = self._grown(problem, new["left"], new["right"], new["residual"], int(state["seed"]), stage)
            return new, Report(norm / problem.observed.norm, "running" if np.isfinite(norm) else "diverged")
        status, kept = progress(new, norm, problem.observed.norm)
        return {**new, **kept}, Report(norm / problem.observed.norm, status)

    def answer(self, state: Arrays) -> Arrays:
        """Return `left` [m, k] and `right` [n, k]."""
        return {"left": state["left"], "right": state["right"]}

    def start(self, problem: Completion, rank: int, seed: int) -> tuple[FloatArray, FloatArray]:
        """Return the factors of a start without continuation."""
        observed = problem.observed
        return halves(next_triples(observed, observed.values, rank, seed, 0, None))

    def begin(self, problem: Completion, left: FloatArray, right: FloatArray) -> State:
        """Return the arrays of a stage that starts from these factors."""
        return {"left": left, "right": right, "residual": problem.observed.residual(left, right)}

    def iterate(self, problem: Completion, state: State) -> State:
        """Return the arrays that one iteration changes; may reuse the memory of the state."""
        raise NotImplementedError

    def _grown(
        self, problem: Completion, left: FloatArray, right: FloatArray, residual: FloatArray, seed: int, stage: int
    ) -> State:
        """Return the state of the stage that adds the residual's triples above the noise to these factors."""
        assert self.continuation is not None
        most = rank_of(problem, self.rank) - left.shape[1]
        triples = next_triples(problem.observed, residual, most, seed, stage, self.continuation.noise_factor)
        new_left, new_right = halves(triples)
        return self._stage(problem, np.hstack([left, new_left]), np.hstack([right, new_right]), seed, stage)

    def _stage(self, problem: Completion, left: FloatArray, right: FloatArray, seed: int, stage: int) -> State:
        begun = self.begin(problem, left, right)
        return {
            **row_major(begun),
            "norm": np.array(np.linalg.norm(begun["residual"])),
            "iterations": np.array(0),
            "seed": np.array(seed),
            "stage": np.array(stage),
            **PROGRESS,
        }


def halves(triples: Triples) -> tuple[FloatArray, FloatArray]:
    """Return the factors U diag(s)^1/2 and V diag(s)^1/2."""
    u, s, v = triples
    return u * np.sqrt(s), v * np.sqrt(s)
