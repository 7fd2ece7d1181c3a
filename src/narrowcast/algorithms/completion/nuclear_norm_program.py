"""Exact completion of least nuclear norm as a linear semidefinite program."""

from __future__ import annotations

import numpy as np

from narrowcast.algorithms.completion.observed import ObservedMatrix
from narrowcast.algorithms.sdp.semidefinite_program import SemidefiniteProgram
from narrowcast.algorithms.sdp.symmetric_constraints import constraints_of
from narrowcast.platform.errors import UserError


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
