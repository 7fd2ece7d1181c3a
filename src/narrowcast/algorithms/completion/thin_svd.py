"""A thin singular value decomposition that changes by matrices of rank 1."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from narrowcast.platform.types import FloatArray

_NOTHING = 1e-13
"""Of the largest singular value, below which one is rounding."""


class ThinSVD(NamedTuple):
    """U diag(s) V' with orthonormal columns: left [m, r], s [r] descending and positive, right [n, r]."""

    left: FloatArray
    s: FloatArray
    right: FloatArray

    @property
    def factors(self) -> tuple[FloatArray, FloatArray]:
        """U diag(s) [m, r] and V [n, r]."""
        return self.left * self.s, self.right

    def plus_rank_one(self, scale: float, u: FloatArray, v: FloatArray) -> ThinSVD:
        """Return the decomposition of scale U diag(s) V' + u v', in O((m + n) r^2).

        Source: Brand, Linear Algebra and its Applications 415(1), 2006, section 3.
        """
        left, p = _with_direction(self.left, u)
        right, q = _with_direction(self.right, v)
        core = np.outer(p, q)
        place = np.arange(len(self.s))
        core[place, place] += scale * self.s
        inner, s, outer = np.linalg.svd(core)
        return _kept(left, inner, s, right, outer.T, len(s))

    def within_face(self, core: FloatArray, most: int) -> ThinSVD:
        """Return the decomposition of U core V' for a positive semidefinite core [r, r], of rank at most `most`."""
        values, vectors = np.linalg.eigh(core)
        down = np.argsort(-values, kind="stable")
        return _kept(self.left, vectors[:, down], values[down], self.right, vectors[:, down], most)

    def orthonormal(self) -> ThinSVD:
        """Return the same matrix with the rounding errors of many changes removed from its vectors."""
        left, inner = np.linalg.qr(self.left)
        right, outer = np.linalg.qr(self.right)
        u, s, vt = np.linalg.svd((inner * self.s) @ outer.T)
        return _kept(left, u, s, right, vt.T, len(s))


def _with_direction(basis: FloatArray, vector: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the basis with the part of a vector that is orthogonal to it, and the vector's coordinates."""
    along = basis.T @ vector
    rest = vector - basis @ along
    again = basis.T @ rest  # one projection is not orthogonal where the vector is nearly in the span
    rest = rest - basis @ again
    length = float(np.linalg.norm(rest))
    if length <= _NOTHING * float(np.linalg.norm(vector)) or basis.shape[1] == len(vector):
        return basis, along + again
    return np.column_stack([basis, rest / length]), np.append(along + again, length)


def _kept(
    left: FloatArray, inner: FloatArray, s: FloatArray, right: FloatArray, outer: FloatArray, most: int
) -> ThinSVD:
    rank = max(1, min(most, int(np.count_nonzero(s > _NOTHING * s[0]))))
    return ThinSVD(left @ inner[:, :rank], s[:rank].copy(), right @ outer[:, :rank])
