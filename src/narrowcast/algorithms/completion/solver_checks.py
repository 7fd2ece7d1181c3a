"""Checks of a completion solver against a problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.completion.completion_problem import Completion
from narrowcast.platform.errors import UserError
from narrowcast.platform.solver_contracts import name_of

_LEAST, _MOST = 1e-100, 1e100


def check_completion(problem: Any, rank: int | None) -> None:
    """Raise `UserError` if the problem is no completion problem, or if its matrix has not this rank or is all 0."""
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
            f"the largest observed entry of {problem.name} is {largest:g}, whose squares are no numbers; scale the "
            f"entries to sizes between {_LEAST:g} and {_MOST:g}"
        )


def row_major(state: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays in C order, as a checkpoint keeps them: products of another order round differently."""
    return {name: np.asarray(values, order="C") for name, values in state.items()}


def rank_of(problem: Completion, rank: int | None) -> int:
    """Return the rank of the answer: the solver's, or the problem's if it has none."""
    found = problem.rank if rank is None else rank
    assert found is not None
    return found
