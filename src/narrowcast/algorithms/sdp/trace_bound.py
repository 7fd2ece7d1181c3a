"""A bound on the trace of every feasible matrix, as it follows from the constraints."""

from __future__ import annotations

import numpy as np

from narrowcast.algorithms.sdp.symmetric_constraints import SymmetricConstraints
from narrowcast.platform.types import FloatArray

_MOST_ERROR = 1e-6
"""Of the identity, beyond which a combination of constraints does not count as it."""


def implied_trace_bound(constraints: SymmetricConstraints, targets: FloatArray) -> float | None:
    """Return a bound on the trace of all X >= 0 with <A_i, X> = b_i, or None if the A_i do not span the identity.

    With A*(t) = I + E every feasible X has tr X = <b, t> - <E, X>, so that tr X <= <b, t> / (1 - |E|), where the
    largest row sum bounds the norm of E.
    """
    from scipy.sparse import csr_array, eye_array
    from scipy.sparse.linalg import lsqr

    diagonal = constraints.rows == constraints.columns
    if np.count_nonzero(diagonal) < constraints.size:
        return None
    combined = lsqr(csr_array(constraints.values.T), diagonal.astype(np.float64), atol=1e-14, btol=1e-14)[0]
    error = float(abs(constraints.adjoint(combined) - eye_array(constraints.size)).sum(axis=1).max())
    if error > _MOST_ERROR:
        return None
    return max(0.0, float(targets @ combined)) / (1 - error)
