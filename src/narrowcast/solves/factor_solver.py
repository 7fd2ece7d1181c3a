"""The common part of solvers on two factors: checks, the spectral start, rank continuation, progress and the answer.

A solver ends by its residual against the best so far. With rank continuation a low rank is fitted first, and singular
triples of the residual are added to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.config.files import Section
from narrowcast.platform.errors import UserError
from narrowcast.platform.solving import Solver, Status, StepResult, name_of
from narrowcast.platform.types import Arrays, FloatArray
from narrowcast.solves.completion_problems import Completion
from narrowcast.solves.observed import ObservedMatrix, Triples, leading, random_block

_LEAST, _MOST = 1e-100, 1e100


def check_completion(problem: Any, rank: int | None) -> None:
    """Raise `UserError` if it is not a completion problem, the rank exceeds the matrix, or all entries are 0."""
    if not isinstance(problem, Completion):
        raise UserError(f"{name_of(problem)} is not a matrix completion problem; choose another solver")
    least = min(problem.observed.rows, problem.observed.columns)
    if rank is None and problem.rank is None:
        raise UserError(f"the rank of {problem.name} is not known; set solver.rank, 1 to {least}")
    if rank_of(problem, rank) > least:
        shape = f"{problem.observed.rows} x {problem.observed.columns}"
        raise UserError(f"solver.rank is {rank}, but the matrix is {shape}; lower it to {least} or less")
    largest = float(np.abs(problem.observed.values).max())
    if not largest:
        same = f" less their mean {problem.offset:g}" if problem.offset else ""
        raise UserError(f"the observed entries of {problem.name}{same} are all 0, which leaves nothing to fit")
    if not _LEAST < largest < _MOST:
        raise UserError(
            f"the largest observed entry of {problem.name} is {largest:g}, whose squares are out of range; scale the "
            f"entries to sizes between {_LEAST:g} and {_MOST:g}"
        )


def row_major(state: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays in C order, as a checkpoint keeps them: products of another order round differently."""
    return {name: np.asarray(values, order="C") for name, values in state.items()}


def rank_of(problem: Completion, rank: int | None) -> int:
    """Return the rank of the answer: the solver's, or the problem's if it has none."""
    chosen = problem.rank if rank is None else rank
    assert chosen is not None
    return chosen


PATIENCE = 100
"""Iterations without progress after which a solver has stalled."""
ROUNDING = 1e-13
"""Residual, relative to the data, below which only rounding errors are left to fit."""
_PROGRESS = 1e-3
_FLOOR = 4e-16
_DIVERGED = 1e6

PROGRESS: Arrays = {"best": np.array(math.inf), "waited": np.array(0)}
"""The entries of a state that `progress` keeps, before the first iteration."""


def progress(state: Arrays, norm: float, data_norm: float) -> tuple[Status, dict[str, np.ndarray]]:
    """Return the status after an iteration with this residual norm, and what to keep in the state.

    - diverged: the residual is not finite, or above a million times the data;
    - converged: it is at the floor, or at the rounding error of the data without a fall of a thousandth in `PATIENCE`
      iterations;
    - stalled: no fall of a thousandth in `PATIENCE` iterations, above the rounding error;
    - running: otherwise.
    """
    best, waited = float(state["best"]), int(state["waited"]) + 1
    if norm < (1 - _PROGRESS) * best:
        best, waited = norm, 0
    record = {"best": np.array(best), "waited": np.array(waited)}
    if not norm <= _DIVERGED * data_norm:
        return "diverged", record
    if norm <= _FLOOR * data_norm:
        return "converged", record
    if waited < PATIENCE:
        return "running", record
    return ("converged" if norm <= ROUNDING * data_norm else "stalled"), record


_PASSES = 2
"""Of subspace iteration: a third one changed no number of iterations, a single one did."""


class Continuation(Section):
    """Rank continuation of a factor method.

    Of the leading vectors of the zero-filled matrix, the usual start, those whose singular values are below the noise
    of sampling are noise themselves, and descent from there stalls. A stage therefore fits the triples above the
    noise, at least one; once it has converged, the residual has shrunk, the noise with it, and the next triples are
    seen.

    Source: R3MC with rank updates (Mishra and Sepulchre, arXiv:1306.2672, section IV) and the pursuits of LRGeomCG
    (Vandereycken, SIAM J. Optim. 23(2), 2013). Differs from the papers: 1. several triples are added at once, as many
    as stand above the noise; 2. a stage ends by its own progress.
    """

    stage_drop: float = Field(
        0.02, gt=0, lt=1, description="a stage ends when an iteration lowers the residual by less than this share"
    )
    stage_iterations: int = Field(100, ge=1, description="most iterations of a stage before the last")
    noise_factor: float = Field(
        1.0, ge=0, description="singular values of the residual above this many times the noise are added at once"
    )

    def is_over(self, before: float, after: float, iterations: int) -> bool:
        """Return whether a stage ends after so many iterations, the last of which took the residual to `after`."""
        return iterations >= self.stage_iterations or after > (1 - self.stage_drop) * before


def noise_of(observed: ObservedMatrix, residual: FloatArray) -> float:
    """Return an estimate of the spectral norm of the noise of sampling in D / p, for this residual [p].

    The noise has independent entries, whose variances follow the residual: the largest norm of a row plus that of a
    column (Bandeira and van Handel, Ann. Probab. 44(4), 2016, theorem 1.1).
    """
    share, squares = observed.fraction, residual**2
    by_row = observed.times(squares, np.ones((observed.columns, 1)))
    by_column = observed.transposed_times(squares, np.ones((observed.rows, 1)))
    return math.sqrt(1 - share) / share * (math.sqrt(by_row.max()) + math.sqrt(by_column.max()))


def next_triples(
    observed: ObservedMatrix, residual: FloatArray, most: int, seed: int, draw: int, noise_factor: float | None
) -> Triples:
    """Return the leading triples of the residual divided by the observed share, at most `most`.

    With a noise factor, those above the noise and at least one; without, `most`.
    """
    u, s, v = leading(observed, residual, most, random_block(observed, most, seed, draw), _PASSES)
    s = s / observed.fraction
    if noise_factor is not None:
        noise = noise_factor * noise_of(observed, residual)
        most = max(1, int(np.count_nonzero(s > noise)))
    return u[:, :most], s[:most], v[:, :most]


State = dict[str, NDArray[Any]]


class FactorSolver(Solver, Section):
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
        """Raise `UserError` if the problem is not a completion problem or the rank exceeds its matrix."""
        check_completion(problem, self.rank)

    def init(self, problem: Completion, seed: int) -> Arrays:
        """Return the start, or the stage of the first triples above the noise with rank continuation."""
        self.check(problem)
        if self.continuation is None:
            return self._stage(problem, *self.start(problem, rank_of(problem, self.rank), seed), seed, 0)
        observed = problem.observed
        empty = np.empty((observed.rows, 0)), np.empty((observed.columns, 0))
        return self._grown(problem, *empty, observed.values, seed, 0)

    def step(self, problem: Completion, state: Arrays) -> tuple[Arrays, StepResult]:
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
            return new, StepResult(norm / problem.observed.norm, "running" if np.isfinite(norm) else "diverged")
        status, record = progress(new, norm, problem.observed.norm)
        return {**new, **record}, StepResult(norm / problem.observed.norm, status)

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
