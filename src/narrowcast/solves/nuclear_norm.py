"""The nuclear norm: its semidefinite program, leading eigenpairs and singular pairs, and the metrics of a ball.

Leading pairs are computed by Lanczos with full reorthogonalisation. The best matrix of rank 1 for a gradient follows
from one, and so does the gap of an answer under a bound on the nuclear norm.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import FloatArray
from narrowcast.solves.observed import ObservedMatrix, truncated
from narrowcast.solves.semidefinite import SemidefiniteProgram, constraints_of


def nuclear_norm_program(name: str, source: str, observed: ObservedMatrix) -> SemidefiniteProgram:
    """Return min (tr W1 + tr W2) / 2 over Z = [[W1, X], [X', W2]] >= 0 with X_ij = M_ij at the observed entries.

    The optimum is the least nuclear norm of a matrix X [m, n] with these entries. With Z = V V', the rows of V [m + n,
    k] are the factors of X = V[:m] V[m:]'. Constraint e has one entry, 1/2 at (i, m + j). For a dual point y the slack
    is [[I, -Y], [-Y', I]] / 2, where Y has y at the observed entries: it is positive semidefinite where the spectral
    norm of Y is at most 1, which makes <M, y> the dual of the nuclear norm.

    Raise `UserError` if all entries are 0.

    Source: Fazel, Hindi and Boyd, American Control Conference 2001, for the program; Candes and Recht, Foundations of
    Computational Mathematics 9, 2009, for completion.
    """
    from scipy.sparse import csr_array, eye_array

    if not observed.values.any():
        raise UserError(f"the observed entries of {name} are all 0, which leaves nothing to fit")
    size, entry = observed.rows + observed.columns, np.arange(observed.count)
    row, column = observed.row_of_entries().astype(np.int64), observed.rows + observed.indices.astype(np.int64)
    constraints = constraints_of(size, observed.count, entry, row, column, np.full(observed.count, 0.5))
    return SemidefiniteProgram(name, source, csr_array(eye_array(size) / 2), constraints, observed.values)


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

    The operator is symmetric. It ends once the residual is at most `tolerance` times the Ritz value of largest
    magnitude.

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


logger = logging.getLogger(__name__)

NEGLIGIBLE = 1e-6
"""Of the largest singular value, below which another one does not count in the rank of an answer."""
_TOLERANCE, _PRODUCTS = 1e-10, 300
"""Of Lanczos where an answer is measured."""


class SingularPair(NamedTuple):
    """The leading unit vectors u [m] and v [n] of a sparse matrix, and a number its spectral norm is not above."""

    left: FloatArray
    right: FloatArray
    norm: float


def leading_pair(
    observed: ObservedMatrix, values: FloatArray, start: FloatArray, tolerance: float, most: int
) -> SingularPair:
    """Return the leading singular pair of D, which has these values at the observed entries; start [n].

    Lanczos on D'D, at most `most` products with it. The norm is that of `Eigenpair.above`.
    """

    def product(x: FloatArray) -> FloatArray:
        return observed.transposed_times(values, observed.times(values, x[:, None]))[:, 0]

    pair = leading_eigenpair(product, start, tolerance, most)
    image = observed.times(values, pair.vector[:, None])[:, 0]
    length = float(np.linalg.norm(image))
    left = image / length if length else np.eye(1, len(image))[0]
    return SingularPair(left, pair.vector, math.sqrt(max(pair.above, 0.0)))


def radius_of(observed: ObservedMatrix, rank: int | None, radius: float | None) -> float:
    """Return the radius, or an estimate from the observed entries, of which a warning is logged.

    The estimate is sqrt(k) |P_Omega(M)| sqrt(m n / p), the largest nuclear norm of a matrix of rank k with the same
    mean square, where k is the rank, and 1 where that is not known.
    """
    if radius is not None:
        return radius
    default = math.sqrt((rank or 1) / observed.fraction) * observed.norm
    logger.warning("solver.radius is not set; %.6g is taken from the size of the observed entries: tune it", default)
    return default


def ball_metrics(observed: ObservedMatrix, left: FloatArray, right: FloatArray, radius: float) -> Mapping[str, float]:
    """Return objective, certified gap, nuclear norm and rank of an answer of a solver over the ball of this radius.

    `objective` f is half the sum of squared errors on the observed entries. `gap` is <grad f(X), X> plus the radius
    times the spectral norm of the gradient: f is convex, so f(X) less the gap is a lower bound on it over the ball.
    """
    residual = observed.residual(left, right)
    start = generator(0, "nuclear ball start").standard_normal(observed.columns)
    norm = leading_pair(observed, residual, start, _TOLERANCE, _PRODUCTS).norm
    spread = truncated(left, right, left.shape[1])[1]
    fitted = observed.values - residual
    return {
        "objective": float(residual @ residual) / 2,
        "gap": radius * norm - float(residual @ fitted),
        "nuclear_norm": float(spread.sum()),
        "rank": float(np.count_nonzero(spread > NEGLIGIBLE * spread[0])),
    }
