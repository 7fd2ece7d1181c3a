"""The best approximation of rank r of each client's update, by singular value decomposition.

A baseline of Nguyen et al., WWW 2024 (arXiv:2401.03748), after Konecny et al., arXiv:1610.05492. With a warm start:
Halko, Martinsson and Tropp, SIAM Review 2011 (arXiv:0909.4061), Algorithms 4.4 and 5.1.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.factors import LEFT, RIGHT, Factored
from narrowcast.algorithms.codecs.nonzero_rows import nonzero_rows
from narrowcast.algorithms.codecs.stage import Shapes, Tensors
from narrowcast.algorithms.codecs.warm_factors import kept_factors, start, zero_factors
from narrowcast.platform.types import Arrays, FloatArray

_VALUES = "/singular_values"
_WARM = "svd/"


class SVD(Factored):
    """Send the r largest singular values of an update with their vectors.

    `parts: uv` sends U S and V, r (m + d) values; `usv` sends the three separately, r (m + d + 1), as the code released
    with CoLR does.

    `warm_start` takes `iterations` of subspace iteration from the right factor V of the client's last update, which the
    client keeps, in place of the exact decomposition. A client's directions change little from one update to the next,
    so that few iterations come near it (tested: exact in the limit; one is PowerSGD's product).

    Differs from the paper: 1. its tables count r m values, those of U alone; here all factors are counted. 2. the
    decomposition is computed from the smaller Gram matrix in float64, several times faster for thin matrices and equal
    to float32 precision.
    """

    kind: Literal["svd"] = "svd"
    parts: Literal["uv", "usv"] = Field("uv", description="send U S and V, or U, S and V")
    warm_start: bool = Field(False, description="subspace iteration from the client's last V; otherwise exact")
    iterations: int = Field(1, ge=1, le=64, description="subspace iterations of a warm start")

    @property
    def remembers(self) -> bool:
        """Return whether the client keeps V."""
        return self.warm_start

    def factor_shapes(self, name: str, rows: int, columns: int, rank: int) -> Shapes:
        """Return U [m, r], V [d, r], and the singular values [r] with `usv`."""
        shapes = dict(super().factor_shapes(name, rows, columns, rank))
        return shapes if self.parts == "uv" else {**shapes, name + _VALUES: (rank,)}

    def factor(self, name: str, matrix: NDArray[Any], rank: int, key: int, state: Arrays) -> tuple[Tensors, Arrays]:
        """Return the factors of the truncated decomposition, exact or from the last one."""
        if self.warm_start:
            first = start(_WARM + name, matrix.shape[1], rank, key, state)
            left, values, right = iterated_svd(matrix, first, self.iterations)
        else:
            left, values, right = truncated_svd(matrix, rank)
        kept = kept_factors(_WARM + name, right.T * values, state)
        if self.parts == "uv":
            left = left * values
        factors = {name + LEFT: left, name + RIGHT: right.T, name + _VALUES: values}
        rows, columns = matrix.shape
        sent = self.factor_shapes(name, rows, columns, rank)
        return {each: factors[each].astype(matrix.dtype) for each in sent}, kept

    def init_state(self, shapes: Shapes, rest: Codec) -> Arrays:
        """Return zeros for every factored matrix if it starts warm, and the state of the rest."""
        warm = zero_factors(_WARM, self.factored(shapes), self.rank) if self.warm_start else {}
        return {**super().init_state(shapes, rest), **warm}

    def product(self, name: str, factors: Tensors) -> NDArray[Any]:
        """Return U S V^T; rows of zeros in U cost nothing."""
        if self.parts == "uv":
            return super().product(name, factors)
        left, right = factors[name + LEFT], factors[name + RIGHT].T * factors[name + _VALUES][:, None]
        used = np.flatnonzero(nonzero_rows(left))
        matrix = np.zeros((len(left), right.shape[1]), dtype=left.dtype)
        matrix[used] = left[used] @ right
        return matrix


def iterated_svd(matrix: NDArray[Any], first: FloatArray, iterations: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return `truncated_svd` approximately, by subspace iteration from V [d, r], at least one."""
    dense, right = matrix.astype(np.float64), first
    for _ in range(iterations):
        left, _ = np.linalg.qr(dense @ right)
        right = dense.T @ left
    # M is close to left right^T; the decomposition of the small side orders and separates the directions
    turned, values, directions = np.linalg.svd(right.T, full_matrices=False)
    return left @ turned, values, directions


def truncated_svd(matrix: NDArray[Any], rank: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return U [m, r], the r largest singular values descending, and V [r, d], of a finite matrix [m, d].

    Rows of zeros, of which a client's change has many, cost nothing: their rows of U are zero.
    """
    wide = matrix.shape[0] < matrix.shape[1]
    tall = matrix.T if wide else matrix
    nonzero = nonzero_rows(tall)
    used = slice(None) if not wide and nonzero.all() else nonzero
    dense = tall[used].astype(np.float64)
    _, vectors = np.linalg.eigh(dense.T @ dense)
    right = vectors[:, ::-1][:, :rank]
    image = dense @ right
    values = np.sqrt(np.einsum("mr,mr->r", image, image))
    left = np.zeros((len(tall), rank))
    left[used] = np.divide(image, values, out=np.zeros_like(image), where=values > 0)
    return (right, values, left.T) if wide else (left, values, right.T)
