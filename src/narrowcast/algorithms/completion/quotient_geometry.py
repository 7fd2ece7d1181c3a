"""Geometry of matrices U diag(s) V' of fixed rank under R3MC's scaled metric.

A direction at (U, R, V) with R = diag(s) is (xi_U [m, k], xi_R [k, k], xi_V [n, k]). The metric is
tr(R R' xi_U' eta_U) + tr(R'R xi_V' eta_V) + tr(xi_R' eta_R). With a diagonal R all equations are solved entry by entry.

Source: Mishra and Sepulchre, arXiv:1306.2672, sections II and III.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from narrowcast.platform.types import FloatArray


@dataclass(frozen=True)
class FixedRankPoint:
    """U diag(s) V'; orthonormal u [m, k] and v [n, k], s [k] positive."""

    u: FloatArray
    s: FloatArray
    v: FloatArray


@dataclass(frozen=True)
class Direction:
    """A tangent vector at a point."""

    u: FloatArray
    r: FloatArray
    v: FloatArray

    def plus(self, factor: float, other: Direction) -> Direction:
        """Return this direction plus a multiple of the other."""
        return Direction(self.u + factor * other.u, self.r + factor * other.r, self.v + factor * other.v)


def inner(point: FixedRankPoint, one: Direction, other: Direction) -> float:
    """Return the metric's inner product of two directions."""
    weights = point.s**2
    return float(
        np.einsum("ik,ik,k->", one.u, other.u, weights)
        + np.einsum("ik,ik,k->", one.v, other.v, weights)
        + np.vdot(one.r, other.r)
    )


def gradient(point: FixedRankPoint, towards_u: FloatArray, towards_v: FloatArray) -> Direction:
    """Return minus the Riemannian gradient of ||D||^2 / 2 from D V [m, k] and D'U [n, k], D being the residual."""
    inside = point.u.T @ towards_u
    return Direction(
        _scaled_tangent(point.u, point.s, towards_u, inside * point.s),
        inside,
        _scaled_tangent(point.v, point.s, towards_v, inside.T * point.s),
    )


def _scaled_tangent(basis: FloatArray, s: FloatArray, towards: FloatArray, inside: FloatArray) -> FloatArray:
    """Return (G - U B) (R R')^-1 with G = towards R and the symmetric B that makes it a tangent."""
    moved = s[:, None] ** 2 * inside
    b = (moved + moved.T) / (s[:, None] ** 2 + s[None, :] ** 2)
    return (towards * s - basis @ b) / s**2


def horizontal(point: FixedRankPoint, direction: Direction) -> Direction:
    """Return the part of a direction of the ambient space that is tangent, and changes the matrix."""
    u, v = (_tangent(basis, point.s, part) for basis, part in ((point.u, direction.u), (point.v, direction.v)))
    s, r = point.s, direction.r
    squares, product = s[:, None] ** 2 + s[None, :] ** 2, s[:, None] * s[None, :]
    a = _skew((point.u.T @ u) * s**2 - r * s)
    c = _skew((point.v.T @ v) * s**2 + s[:, None] * r)
    determinant = squares**2 - product**2
    one, two = (squares * a + product * c) / determinant, (squares * c + product * a) / determinant
    return Direction(u - point.u @ one, r - (s[:, None] * two - one * s), v - point.v @ two)


def _tangent(basis: FloatArray, s: FloatArray, part: FloatArray) -> FloatArray:
    """Return the part of a direction [m, k] that is tangent to orthonormal bases, under the metric."""
    inside = basis.T @ part
    moved = s[:, None] ** 2 * (inside + inside.T) * s**2
    return part - basis @ (moved / (s[:, None] ** 2 + s[None, :] ** 2)) / s**2


def retracted(
    point: FixedRankPoint, direction: Direction, step: float
) -> tuple[FixedRankPoint, FloatArray, FloatArray]:
    """Return the point after a step, by polar factors, and the rotations of U and V that make its R diagonal."""
    u, v = (_polar(basis + step * part) for basis, part in ((point.u, direction.u), (point.v, direction.v)))
    left, s, right = np.linalg.svd(np.diag(point.s) + step * direction.r)
    return FixedRankPoint(u @ left, s, v @ right.T), left, right.T


def transported(point: FixedRankPoint, direction: Direction, left: FloatArray, right: FloatArray) -> Direction:
    """Return a direction moved to the point, to which these rotations belong."""
    return horizontal(point, Direction(direction.u @ left, left.T @ direction.r @ right, direction.v @ right))


def _polar(matrix: FloatArray) -> FloatArray:
    u, _, vt = np.linalg.svd(matrix, full_matrices=False)
    return np.asarray(u @ vt)


def _skew(matrix: FloatArray) -> FloatArray:
    return (matrix - matrix.T) / 2
