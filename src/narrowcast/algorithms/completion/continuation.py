"""Rank continuation: a low rank is fitted first, and singular triples of the residual are added to it."""

from __future__ import annotations

import math

import numpy as np
from pydantic import Field

from narrowcast.algorithms.completion.low_rank_matrix import Triples, leading, random_block
from narrowcast.algorithms.completion.observed import ObservedMatrix
from narrowcast.platform.section import Section
from narrowcast.platform.types import FloatArray

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
