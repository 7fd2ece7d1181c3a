"""Whether an iteration can go on: its residual against the best so far."""

from __future__ import annotations

import math

import numpy as np

from narrowcast.platform.solver_contracts import Status
from narrowcast.platform.types import Arrays

PATIENCE = 100
"""Iterations without progress after which a solver has stalled."""
_PROGRESS = 1e-3
_FLOOR = 4e-16
_DIVERGED = 1e6

PROGRESS: Arrays = {"best": np.array(math.inf), "waited": np.array(0)}
"""What `progress` keeps in a state, before the first iteration."""


def progress(state: Arrays, norm: float, data_norm: float) -> tuple[Status, dict[str, np.ndarray]]:
    """Return the status after an iteration with this residual norm, and what to keep in the state.

    A residual at the rounding error of the data has converged; one that has not fallen by a thousandth in `PATIENCE`
    iterations has stalled; one that is not finite, or a million times the data, has diverged.
    """
    best, waited = float(state["best"]), int(state["waited"])
    if not math.isfinite(norm) or norm > _DIVERGED * data_norm:
        status: Status = "diverged"
    elif norm <= _FLOOR * data_norm:
        status = "converged"
    else:
        status = "stalled" if waited + 1 >= PATIENCE else "running"
    if norm < (1 - _PROGRESS) * best:
        if status == "stalled":
            status = "running"
        return status, {"best": np.array(norm), "waited": np.array(0)}
    return status, {"best": np.array(best), "waited": np.array(waited + 1)}
