"""The largest eigenvalue of a symmetric operator by Lanczos, with full reorthogonalisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from narrowcast.platform.types import FloatArray

_EVERY = 4
"""Products between two looks at the Ritz values."""
_BREAKDOWN = 1e-13
"""Of the largest Ritz value, below which the Krylov space is invariant."""


class Eigenpair(NamedTuple):
    """A Ritz value, its unit vector [n], and the norm of its residual: some eigenvalue is as near as that."""

    value: float
    vector: FloatArray
    residual: float

    @property
    def above(self) -> float:
        """The Ritz value plus its residual.

        No eigenvalue is above it unless its vector is orthogonal to the start, which has probability zero for a
        random one but is not excluded.
        """
        return self.value + self.residual


def leading_eigenpair(
    product: Callable[[FloatArray], FloatArray], start: FloatArray, tolerance: float, most: int
) -> Eigenpair:
    """Return the largest eigenvalue of an operator [n] -> [n] from a start [n], after at most `most` products.

    It ends once the residual is at most `tolerance` times the Ritz value of largest magnitude.

    Source: Kuczynski and Wozniakowski, SIAM J. Matrix Anal. Appl. 13(4), 1992, with a random start.
    """
    most = min(most, len(start))
    basis = np.zeros((most, len(start)))
    basis[0] = start / np.linalg.norm(start)
    diagonal, beside = np.zeros(most), np.zeros(most)
    for k in range(most):
        image = product(basis[k])
        diagonal[k] = float(basis[k] @ image)
        for _ in range(2):  # once loses orthogonality where a Ritz value has converged
            image = image - basis[: k + 1].T @ (basis[: k + 1] @ image)
        beside[k] = float(np.linalg.norm(image))
        last = k + 1 == most
        if last or (k + 1) % _EVERY == 0 or beside[k] <= _BREAKDOWN * np.abs(diagonal[: k + 1]).max():
            tridiagonal = np.diag(diagonal[: k + 1]) + np.diag(beside[:k], 1) + np.diag(beside[:k], -1)
            values, vectors = np.linalg.eigh(tridiagonal)
            residual, scale = beside[k] * abs(vectors[-1, -1]), float(np.abs(values).max())
            if last or residual <= tolerance * scale or beside[k] <= _BREAKDOWN * scale:
                vector = vectors[:, -1] @ basis[: k + 1]
                return Eigenpair(float(values[-1]), vector / np.linalg.norm(vector), float(residual))
        basis[k + 1] = image / beside[k]
    raise AssertionError("the last product returns")
