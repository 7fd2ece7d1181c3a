"""The bound of Barvinok and Pataki on the rank of some solution of a semidefinite program."""

from __future__ import annotations

import logging
import math

logger = logging.getLogger(__name__)


def pataki_rank(constraints: int) -> int:
    """Return the largest r with r (r + 1) / 2 <= m: a solution, if there is one, exists with at most this rank.

    Source: Barvinok, Discrete and Computational Geometry 13, 1995; Pataki, Mathematics of Operations Research 23, 1998.
    """
    return (math.isqrt(8 * constraints + 1) - 1) // 2


def warn_of_low_rank(rank: int | None, bound: int) -> None:
    """Warn of columns that are set, but fewer than the rank that some solution is known to have at most."""
    if rank is not None and rank < bound:
        logger.warning(
            "rank %d is below %d, which some solution needs at most; the optimum may not be reached: see the gap",
            rank,
            bound,
        )
