"""The test that ends a solver: its residual against the best so far."""

from __future__ import annotations

import math

import numpy as np

from narrowcast.platform.solver_contracts import Status
from narrowcast.platform.types import Arrays

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

    A residual that has not fallen by a thousandth in `PATIENCE` iterations has converged if it is at the rounding error
    of the data, and stalled if not; one that is not finite, or a million times the data, has diverged.
    """
    best, waited = float(state["best"]), int(state["waited"]) + 1
    if norm < (1 - _PROGRESS) * best:
        best, waited = norm, 0
    kept = {"best": np.array(best), "waited": np.array(waited)}
    if not norm <= _DIVERGED * data_norm:
        return "diverged", kept
    if norm <= _FLOOR * data_norm:
        return "converged", kept
    if waited < PATIENCE:
        return "running", kept
    return ("converged" if norm <= ROUNDING * data_norm else "stalled"), kept
